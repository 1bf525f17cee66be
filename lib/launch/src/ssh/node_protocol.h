#pragma once

#include <syncbn/launch/options.h>

#include <cstddef>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "job/run_context.h"
#include "output/output.h"

/// Head and node exchange lines of JSON, objects with a "type":
///
///   head → node, its stdin     job · go (master_port) · signal · alive
///   node → head, its stderr    problem, or ready · ended
///
/// A node's messages start with the job's mark, a random text that workers do not know: lines
/// without it are the workers'.
namespace syncbn::launch {

/// The only argument of a launcher that a head starts. Everything else goes over stdin, where no
/// shell interprets it.
inline constexpr const char* kFromHead = "--from_head";

/// A head's first message to a node.
struct NodeJob {
  std::string version;  ///< of the head
  std::string mark;
  std::string folder = {};  ///< working directory
  std::string token = {};   ///< LaunchOptions::token
  Variables environment = {};
  std::vector<std::string> words = {};  ///< the node's command line
  bool speaks_for_all = false;          ///< MessageScope::kWholeJob
  Streams colours = {};                 ///< LaunchOptions::colours

  nlohmann::json to_json() const;
  /// If the version differs, reads only version and mark. @throws nlohmann's exceptions.
  static NodeJob from_json(const nlohmann::json& message);
};

/// From a node: it waits for the head's go.
struct NodeReady {
  int master_port = 0;  ///< that it holds, or 0
};

/// From a node: it cannot start.
struct NodeProblem {
  int exit_code = 0;  ///< not 0
  std::string what;
};

/// From a node: all of its workers have ended.
struct NodeEnded {
  int exit_code = 0;
  std::string report;          ///< in JSON
  bool tells_failure = false;  ///< set by parse_node_message(): the report is of a worker's failure
};

using NodeMessage = std::variant<NodeReady, NodeProblem, NodeEnded>;

/// One line, which NodeLines recognises by the mark.
std::string node_line(const std::string& mark, const NodeMessage& message);
/// Empty if the message is invalid.
std::optional<NodeMessage> parse_node_message(std::string_view text);

/// Separates the stderr of a node's launcher into its messages to the head, each after the job's
/// mark at the end of a line, and its workers' lines. Long lines are cut as by a LineSplitter.
/// Messages with reports may be longer; above kLongestMessage, which no launcher sends, they are
/// cut and no longer valid JSON.
class NodeLines {
 public:
  static constexpr size_t kLongestMessage = 64 << 20;
  struct Sinks {
    std::function<void(std::string_view line)> line;  ///< without its newline
    std::function<void(std::string_view message)> message;
  };

  explicit NodeLines(std::string mark) : mark_(std::move(mark)) {}

  void feed(std::string_view bytes, const Sinks& to);
  /// Passes on a last line without a newline. An incomplete message is dropped.
  void finish(const Sinks& to);

 private:
  std::string mark_;
  LineSplitter lines_{kLongestMessage};
};

}  // namespace syncbn::launch

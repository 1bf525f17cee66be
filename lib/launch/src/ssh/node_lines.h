#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace syncbn::launch {

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

  explicit NodeLines(std::string mark);

  void feed(std::string_view bytes, const Sinks& to);
  /// Passes on a last line without a newline. An incomplete message is dropped.
  void finish(const Sinks& to);

 private:
  void end_line(const Sinks& to);
  void cut(const Sinks& to);

  std::string mark_;
  std::string line_;  ///< the incomplete last line
};

}  // namespace syncbn::launch

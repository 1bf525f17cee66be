#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// A message from a node to its head. See node_job.h for the order of messages.
struct NodeMessage {
  enum class Kind {
    kReady,    ///< the node waits for the head's go
    kProblem,  ///< cannot start
    kEnded,    ///< all of its workers have ended
  };

  Kind kind = Kind::kReady;
  int master_port = 0;         ///< kReady: the port that it holds; 0: none
  int exit_code = 0;           ///< kProblem: not 0; kEnded
  std::string text = {};       ///< kProblem: what is wrong; kEnded: the report, in JSON
  bool tells_failure = false;  ///< kEnded: the report is about a worker's failure; set by parse()

  nlohmann::json json() const;
  /// Empty if the message is invalid.
  static std::optional<NodeMessage> parse(std::string_view text);
};

}  // namespace syncbn::launch

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// What a node tells its head; node_job.h has the course of their talk.
struct NodeMessage {
  enum class Kind {
    kReady,    ///< waits for the head's go
    kProblem,  ///< cannot start
    kEnded,    ///< all of its workers have ended
  };

  Kind kind = Kind::kReady;
  int master_port = 0;         ///< kReady: that it holds; 0: none
  int exit_code = 0;           ///< kProblem: not 0; kEnded
  std::string text = {};       ///< kProblem: what is wrong; kEnded: the report, in JSON
  bool tells_failure = false;  ///< kEnded, as parse() finds it: the report is of a worker's failure

  nlohmann::json json() const;
  /// Nothing when it makes no sense.
  static std::optional<NodeMessage> parse(std::string_view text);
};

}  // namespace syncbn::launch

#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "nodes/agent_link.h"

namespace syncbn::launch {

/// A launcher of the job, as the coordinator sees it: the connection, and what is known of its
/// node.
struct PeerLauncher {
  using Clock = std::chrono::steady_clock;

  /// @param first_bytes what has been read from the socket already.
  PeerLauncher(base::UniqueFd socket, std::string first_bytes);

  AgentLink link;
  bool greeted = false;
  int rank = -1;  ///< of the node; -1: it has not said hello
  int nproc = 0;
  std::string host;
  std::string role;
  bool takes_part = false;  ///< in this attempt
  bool ended = false;       ///< its workers, in this attempt
  bool leaving = false;     ///< it ends, and the others do not
  bool paused = false;      ///< stopped, as by Ctrl-Z
  Clock::time_point heard = Clock::now();

  std::string name() const;

  /// Reads and writes what is possible now, and hands each message to `take`. Refuses a peer of
  /// another version, and one whose message makes `take` throw nlohmann's exceptions.
  void handle(const std::function<void(const nlohmann::json&)>& take);
  void refuse(int exit_code, const std::string& why);
};

}  // namespace syncbn::launch

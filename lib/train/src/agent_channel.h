#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <syncbn/agent.h>
#include <syncbn/base/unique_fd.h>

namespace syncbn::train {

/// This worker's end of the launcher's channel (see syncbn/agent.h); does nothing without a
/// launcher. Never blocks: what the pipe cannot take is dropped.
class AgentChannel {
 public:
  /// Adopts the descriptor named in the environment and says hello.
  explicit AgentChannel(int rank);

  explicit operator bool() const { return static_cast<bool>(fd_); }

  /// That this worker is alive after `steps` steps; at most once a second.
  void heartbeat(uint64_t steps);

  /// What a progress bar should show.
  void progress(uint64_t done, uint64_t total, const std::string& text);

  /// The progress bar is over.
  void clear();

 private:
  void send(syncbn_agent_kind kind, uint64_t done, uint64_t total, const std::string& text);

  int rank_;
  base::UniqueFd fd_;
  std::chrono::steady_clock::time_point last_heartbeat_;
};

}  // namespace syncbn::train

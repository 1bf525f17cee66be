#pragma once

#include <syncbn/agent.h>
#include <syncbn/base/progress_bar.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace syncbn::train {

/// This worker's end of the launcher's channel (see syncbn/agent.h). Does nothing without a
/// launcher. Never blocks: a record that the pipe has no room for is dropped.
class AgentChannel {
 public:
  /// Adopts the descriptor named in the environment and says hello.
  explicit AgentChannel(int rank);

  explicit operator bool() const { return static_cast<bool>(fd_); }

  /// Reports `steps` finished steps, at most once a second.
  void heartbeat(uint64_t steps);

  syncbn_agent_record send(syncbn_agent_kind kind, uint64_t done = 0, uint64_t total = 0,
                           const std::string& text = {});

 private:
  int rank_;
  base::UniqueFd fd_;
  std::chrono::steady_clock::time_point last_heartbeat_;
};

/// Rank 0's progress bar. The launcher draws it; without one, this process, on a terminal.
class Progress {
 public:
  explicit Progress(AgentChannel& channel);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows `done` of `total` steps and `text`, at most ten times a second.
  void show(int64_t done, int64_t total, const std::string& text);

  /// Logs a line in place of the bar. Lines that follow each other within a tenth of a second are
  /// written at once: a small network has a thousand steps a second.
  void log(const std::string& line);

  /// Removes the bar, so that a log line can be printed, and writes what log() has not written yet.
  void clear();

 private:
  void update(const syncbn_agent_record& record, base::ProgressBar::Clock::time_point now);

  AgentChannel& channel_;
  bool draws_;
  base::ProgressBar bar_;
  base::ProgressBar::Clock::time_point last_;
  std::string lines_;  ///< not written yet
  base::ProgressBar::Clock::time_point written_;
};

}  // namespace syncbn::train

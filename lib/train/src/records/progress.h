#pragma once

#include <syncbn/agent.h>
#include <syncbn/base/progress_bar.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace syncbn::train {

/// This worker's end of the launcher's channel (see syncbn/agent.h). Does nothing without a
/// launcher. Never blocks: it drops a record if the pipe is full.
class AgentChannel {
 public:
  /// Adopts the descriptor named in the environment and says hello.
  explicit AgentChannel(int rank);

  /// Reports the last steps: the launcher compares the steps at which ranks fail.
  ~AgentChannel();
  AgentChannel(const AgentChannel&) = delete;
  AgentChannel& operator=(const AgentChannel&) = delete;

  explicit operator bool() const { return static_cast<bool>(fd_); }

  /// Reports `steps` finished steps, at most once a second, and asks the launcher for
  /// hang_timeout().
  void heartbeat(uint64_t steps);

  /// A run without progress for this time hangs. Much longer than any step, so that a slow file
  /// server, a busy machine or a compilation in a later step does not count as a hang.
  static std::chrono::milliseconds hang_timeout(std::chrono::steady_clock::duration longest_step);

  /// Reports what this worker does instead of steps. The next record may come `allowance` later
  /// than usual.
  void phase(const std::string& text, std::chrono::minutes allowance);

  /// Reports that the phase goes on, at most once a second.
  void phase_goes_on(const std::string& text);

  /// Sends text that is useless if truncated: sends nothing if it is too long for a record.
  void tell(syncbn_agent_kind kind, const std::string& text);

  syncbn_agent_record send(syncbn_agent_kind kind, uint64_t done = 0, uint64_t total = 0,
                           const std::string& text = {});

 private:
  bool is_due();  ///< if so, counts the record that follows

  int rank_;
  base::UniqueFd fd_;
  std::chrono::steady_clock::time_point last_heartbeat_;
  uint64_t steps_ = 0;
  bool has_reported_ = true;                            ///< whether `steps_` has been reported
  std::chrono::steady_clock::time_point step_begin_{};  ///< zero after a phase
  std::chrono::steady_clock::duration longest_step_{};
  std::chrono::milliseconds asked_timeout_{};
};

/// Rank 0's progress: a bar that the launcher draws or, without one, this process; without a
/// terminal, a line from time to time.
class Progress {
 public:
  static constexpr std::chrono::milliseconds kLineInterval{30'000};

  /// @param line_interval time between two lines without a terminal
  explicit Progress(AgentChannel& channel, std::chrono::milliseconds line_interval = kLineInterval);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows `done` of `total` steps and a text (see base::ProgressState). Calls `text` at most ten
  /// times a second.
  /// @param as_line false: shows it only in a bar, and restarts the time until the next line
  void show(int64_t done, int64_t total, const std::function<std::string()>& text,
            bool as_line = true);

  /// Logs the same as a line. Writes lines that follow each other within a tenth of a second
  /// together: a small network has a thousand steps a second.
  void log(int64_t done, int64_t total, const std::string& text);

  /// Removes the bar, so that a log line can be printed, and writes what log() has not written yet.
  void clear();

 private:
  using Clock = base::ProgressBar::Clock;

  void update(const syncbn_agent_record& record, Clock::time_point now);

  AgentChannel& channel_;
  const bool draws_;
  std::optional<std::chrono::milliseconds> line_interval_;  ///< empty: there is a bar
  base::ProgressBar bar_;
  Clock::time_point last_;
  Clock::time_point last_line_ = Clock::now();
  std::string lines_;  ///< not written yet
  Clock::time_point written_;
};

}  // namespace syncbn::train

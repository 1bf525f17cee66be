#pragma once

#include <syncbn/agent.h>

#include <chrono>
#include <optional>
#include <string>

namespace syncbn::base {

struct ProgressState {
  uint64_t done = 0;
  uint64_t total = 0;     ///< 0: unknown
  std::string text = {};  ///< parts with two spaces between them, the most important first
  std::chrono::duration<double> elapsed{};
  std::optional<std::chrono::duration<double>> remaining = {};
};

/// One line of fewer than `columns` columns, as a terminal may wrap after its last one:
/// "[#####.....]  50/100   50 %  epoch 3  loss 0.21  0:12 < 0:12". It ends with the time so far and
/// the time left. Leaves out what does not fit, in this order: the counts, the text's parts from
/// the last to the fourth, the bar, the text's other parts, the times.
std::string render_progress(const ProgressState& state, int columns);

/// A line for a file or pipe: "step 50/100   50 %  epoch 3  loss 0.21  0:12 < 0:12".
std::string progress_line(const ProgressState& state);

/// Renders the PROGRESS records of a worker.
class ProgressBar {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPeriod{100};  ///< minimum time between two drawings

  void update(const syncbn_agent_record& record, Clock::time_point now);

  /// When to draw the line again; empty while nothing has changed.
  std::optional<Clock::time_point> due() const;
  /// The line, or "" after CLEAR.
  std::string draw(int columns, Clock::time_point now);

  /// The last PROGRESS record, with its times.
  ProgressState state(Clock::time_point now) const;

 private:
  bool active_ = false;
  bool changed_ = false;
  std::optional<Clock::time_point> started_;
  Clock::time_point drawn_;
  uint64_t first_done_ = 0;
  ProgressState state_;
};

}  // namespace syncbn::base

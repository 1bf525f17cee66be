#pragma once

#include <syncbn/agent.h>

#include <chrono>
#include <optional>
#include <string>

namespace syncbn::base {

struct ProgressState {
  uint64_t done = 0;
  uint64_t total = 0;  ///< 0: unknown
  std::string text = {};
  std::chrono::duration<double> elapsed{};
  std::optional<std::chrono::duration<double>> remaining = {};
};

/// One line of at most `columns` columns:
/// "[#####.....] 50/100  50 %  epoch 3 loss 0.21  0:12 < 0:12".
std::string render_progress(const ProgressState& state, int columns);

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

 private:
  bool active_ = false;
  bool changed_ = false;
  std::optional<Clock::time_point> started_;
  Clock::time_point drawn_;
  uint64_t first_done_ = 0;
  ProgressState state_;
};

}  // namespace syncbn::base

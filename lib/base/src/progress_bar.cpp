#include <syncbn/base/progress_bar.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cmath>

namespace syncbn::base {
namespace {

std::string clock_format(std::chrono::duration<double> duration) {
  const auto seconds = static_cast<int64_t>(duration.count());
  if (seconds < 3600) return fmt::format("{}:{:02}", seconds / 60, seconds % 60);
  return fmt::format("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace

std::string render_progress(const ProgressState& state, int columns) {
  std::string line;
  if (state.total > 0) {
    const double share =
        std::min(1.0, static_cast<double>(state.done) / static_cast<double>(state.total));
    const int width = std::clamp(columns / 4, 5, 30);
    const int filled = static_cast<int>(share * width);
    line = fmt::format("[{:#<{}}{:.<{}}] {}/{} {:3.0f} %", "", filled, "", width - filled,
                       state.done, state.total, std::floor(share * 100));
  } else {
    line = std::to_string(state.done);
  }
  if (!state.text.empty()) line += "  " + state.text;
  line += "  " + clock_format(state.elapsed);
  if (state.remaining) line += " < " + clock_format(*state.remaining);
  // A terminal may wrap after its last column.
  return truncated(std::move(line), columns - 1);
}

void ProgressBar::update(const syncbn_agent_record& record, Clock::time_point now) {
  if (record.kind == SYNCBN_AGENT_CLEAR) {
    changed_ = active_;
    active_ = false;
    return;
  }
  if (record.kind != SYNCBN_AGENT_PROGRESS) return;
  // A smaller count or another total starts a new bar. After CLEAR the same one may go on.
  if (!started_ || record.done < state_.done || record.total != state_.total) {
    started_ = now;
    first_done_ = record.done;
  }
  active_ = true;
  changed_ = true;
  state_.done = record.done;
  state_.total = record.total;
  state_.text = record.text;
}

std::optional<ProgressBar::Clock::time_point> ProgressBar::due() const {
  if (!changed_) return std::nullopt;
  return drawn_ + kPeriod;
}

std::string ProgressBar::draw(int columns, Clock::time_point now) {
  changed_ = false;
  drawn_ = now;
  if (!active_) return {};
  state_.elapsed = now - *started_;
  state_.remaining.reset();
  if (state_.total >= state_.done && state_.done > first_done_) {
    state_.remaining = state_.elapsed * (static_cast<double>(state_.total - state_.done) /
                                         static_cast<double>(state_.done - first_done_));
  }
  return render_progress(state_, columns);
}

}  // namespace syncbn::base

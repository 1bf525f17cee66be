#include <syncbn/base/progress_bar.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

namespace syncbn::base {
namespace {

std::string clock_format(std::chrono::duration<double> duration) {
  const auto seconds = static_cast<int64_t>(duration.count());
  if (seconds < 3600) return fmt::format("{}:{:02}", seconds / 60, seconds % 60);
  return fmt::format("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

constexpr std::string_view kBetween = "  ";

std::vector<std::string> parts_of(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(kBetween), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + kBetween.size(), text.size()));
  }
  return parts;
}

double share_of(const ProgressState& state) {
  return std::min(1.0, static_cast<double>(state.done) / static_cast<double>(state.total));
}

/// "[##...]" in at most `columns` columns; empty if that is too short to show anything.
std::string bar_of(double share, int columns) {
  constexpr int kShortest = 5, kLongest = 30;
  const int width = std::min(columns - 2, kLongest);
  if (width < kShortest) return "";
  const int filled = static_cast<int>(share * width);
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", width - filled);
}

std::string percent_of(const ProgressState& state) {
  return fmt::format("{:3.0f} %", std::floor(share_of(state) * 100));
}

std::string times_of(const ProgressState& state) {
  const std::string elapsed = clock_format(state.elapsed);
  return state.remaining ? elapsed + " < " + clock_format(*state.remaining) : elapsed;
}

}  // namespace

std::string render_progress(const ProgressState& state, int columns) {
  struct Part {
    std::string text;
    int rank;  ///< the lower, the more important
    bool is_shown = false;
  };
  constexpr int kShare = 0, kTimes = 1, kText = 2, kBar = 5, kMoreText = 6, kCounts = 1000;
  constexpr int kFirstTexts = kBar - kText;
  std::vector<Part> parts;
  if (state.total > 0) {
    parts.push_back({"", kBar});
    parts.push_back({fmt::format("{}/{}", state.done, state.total), kCounts});
    parts.push_back({percent_of(state), kShare});
  } else {
    parts.push_back({std::to_string(state.done), kShare});
  }
  const std::vector<std::string> texts = parts_of(state.text);
  for (size_t i = 0; i < texts.size(); ++i) {
    const int at = static_cast<int>(i);
    parts.push_back({texts[i], at < kFirstTexts ? kText + at : kMoreText + at});
  }
  parts.push_back({times_of(state), kTimes});

  std::vector<Part*> by_rank;
  by_rank.reserve(parts.size());
  for (Part& part : parts) by_rank.push_back(&part);
  std::ranges::sort(by_rank, {}, &Part::rank);
  int left = columns - 1;
  for (Part* const part : by_rank) {
    const int between = left == columns - 1 ? 0 : static_cast<int>(kBetween.size());
    const int room = std::max(left - between, 0);
    if (part->rank == kBar) part->text = bar_of(share_of(state), std::min(room, columns / 8 + 2));
    // Another program's text may have no separators: cut it, so that some of it is shown.
    if (part->rank == kText) part->text = truncated(part->text, room);
    const int needed = columns_of(part->text) + between;
    part->is_shown = needed > between && needed <= left;
    if (part->is_shown) left -= needed;
  }
  std::vector<std::string> shown;
  for (const Part& part : parts) {
    if (part.is_shown) shown.push_back(part.text);
  }
  return join(shown, kBetween);
}

std::string progress_line(const ProgressState& state) {
  std::vector<std::string> parts = parts_of(state.text);
  if (state.total > 0) parts.insert(parts.begin(), percent_of(state));
  parts.push_back(times_of(state));
  return fmt::format("step {}{}  {}", state.done,
                     state.total > 0 ? fmt::format("/{}", state.total) : "", join(parts, kBetween));
}

void ProgressBar::update(const syncbn_agent_record& record, Clock::time_point now) {
  if (record.kind == SYNCBN_AGENT_CLEAR) {
    changed_ = active_;
    active_ = false;
    return;
  }
  if (record.kind != SYNCBN_AGENT_PROGRESS) return;
  // A smaller count or another total starts a new bar. After CLEAR the same bar may continue.
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
  return active_ ? render_progress(state(now), columns) : "";
}

ProgressState ProgressBar::state(Clock::time_point now) const {
  ProgressState state = state_;
  if (started_) state.elapsed = now - *started_;
  if (state.total >= state.done && state.done > first_done_) {
    state.remaining = state.elapsed * (static_cast<double>(state.total - state.done) /
                                       static_cast<double>(state.done - first_done_));
  }
  return state;
}

}  // namespace syncbn::base

#include "job/restart_policy.h"

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>

#include <algorithm>

#include "common/processes.h"

namespace syncbn::launch {

std::string FailureCause::describe() const {
  const bool was_idle = step >= 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  return fmt::format("rank {} failed ({})", rank,
                     was_idle ? "no progress" : ExitStatus{status}.in_words());
}

void RestartPolicy::failed(const FailureCause& cause, Clock::time_point now) {
  same_ = cause.step >= 0 && cause == last_ ? same_ + 1 : 1;
  last_ = cause;
  failed_ = now;
  // A program that reports no steps and ran for long may have failed at a different place each
  // time.
  if (cause.step == 0 && now - started_ >= kQuick) last_.step = -1;
}

std::string RestartPolicy::refusal() const {
  if (last_.step >= 0 && same_ >= (last_.step == 0 ? kMaxSameAtStart : kMaxSame)) {
    const std::string where =
        last_.step == 0 ? "before its first step" : fmt::format("at step {}", last_.step);
    return fmt::format("{} {} times in a row {}: a restart does not help", last_.describe(), same_,
                       where);
  }
  const auto counts = [&](Clock::time_point time) {
    return window_.count() == 0 || failed_ - time < window_;
  };
  if (std::ranges::count_if(restarts_, counts) < max_restarts_) return "";
  const std::string window = window_.count() == 0 ? "" : " within " + base::format_seconds(window_);
  return fmt::format("no restart is left (--max_restarts={}{})", max_restarts_, window);
}

std::chrono::milliseconds RestartPolicy::restart() {
  constexpr std::chrono::milliseconds kFirst{500};
  constexpr std::chrono::milliseconds kLongest{30'000};
  restarts_.push_back(failed_);
  if (restarts_.size() > static_cast<size_t>(max_restarts_)) restarts_.pop_front();
  quick_ = failed_ - started_ < kQuick ? quick_ + 1 : 0;
  if (quick_ < 2) return {};
  constexpr int kMaxDoublings = 10;
  return std::min(kLongest, kFirst * (1 << std::min(quick_ - 2, kMaxDoublings)));
}

}  // namespace syncbn::launch

#include "transport/group_abort.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <thread>

namespace syncbn::dist::detail {

void GroupAbort::start(std::optional<std::chrono::steady_clock::time_point> awaited_since) {
  // The threads may outlive the group, so they hold this object and its transports.
  if (cuda_ && !has_started_.exchange(true)) {
    std::thread([self = shared_from_this()] { self->abort_cuda(); }).detach();
    std::thread([self = shared_from_this()] {
      const auto deadline = std::chrono::steady_clock::now() + kLimit;
      while (!self->has_aborted_ || self->in_calls_ > 0) {
        if (std::chrono::steady_clock::now() > deadline) return self->leave_("NCCL");
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }).detach();
  }
  cpu_->abort();
  const auto now = std::chrono::steady_clock::now();
  const auto since = [&] {
    const std::lock_guard lock(mutex_);
    return cpu_aborted_ = cpu_aborted_.value_or(now);
  }();
  if (awaited_since && now - std::max(*since, *awaited_since) > kCpuLimit) {
    leave_("the aborted call");
  }
}

void GroupAbort::abort_cuda() {
  try {
    cuda_->abort();
    has_aborted_ = true;
  } catch (const std::exception& error) {  // the other thread then ends the process
    spdlog::debug("NCCL's abort failed: {}", error.what());
  }
}

}  // namespace syncbn::dist::detail

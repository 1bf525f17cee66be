#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace syncbn::dist::detail {

/// Runs a task, which may never end, on a separate thread, and waits for it.
/// @param goes_on called every `interval`: whether to continue to wait; may throw
/// @return false if goes_on() returned false. Then, and if it threw, the task still runs: it must
///   own what it uses
/// @throws what the task throws
inline bool wait_while(std::function<void()> task, std::chrono::milliseconds interval,
                       const std::function<bool()>& goes_on) {
  std::packaged_task<void()> packaged(std::move(task));
  std::future<void> done = packaged.get_future();
  std::thread(std::move(packaged)).detach();
  while (done.wait_for(interval) != std::future_status::ready) {
    if (!goes_on()) return false;
  }
  done.get();
  return true;
}

}  // namespace syncbn::dist::detail

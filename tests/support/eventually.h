#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace syncbn::test {

/// Waits until `done()` holds. Returns false after a limit that only a hang exceeds.
inline bool eventually(const std::function<bool()>& done,
                       std::chrono::seconds limit = std::chrono::seconds(100)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace syncbn::test

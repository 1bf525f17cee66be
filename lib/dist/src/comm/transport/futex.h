#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace syncbn::dist::detail::shm {

/// Sleeps while `word` is `value`, for at most `limit`. `word` may be shared between processes.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds limit);

/// Wakes all that sleep on `word`, in any process.
void futex_wake(const std::atomic<uint32_t>& word);

}  // namespace syncbn::dist::detail::shm

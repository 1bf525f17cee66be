#include "transport/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace syncbn::dist::detail::shm {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void futex_wait(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds limit) {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec time{.tv_sec = limit.count() / kSecond, .tv_nsec = limit.count() % kSecond};
  // Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace syncbn::dist::detail::shm

#pragma once

#include <sched.h>
#include <syncbn/base/error.h>

namespace syncbn::test {

/// Restores this thread's affinity mask when destroyed.
class Affinity {
 public:
  Affinity() {
    if (::sched_getaffinity(0, sizeof before_, &before_) != 0) base::throw_errno("affinity");
  }
  ~Affinity() { ::sched_setaffinity(0, sizeof before_, &before_); }
  Affinity(const Affinity&) = delete;
  Affinity& operator=(const Affinity&) = delete;

  void bind_to(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(cpu), &one);
    if (::sched_setaffinity(0, sizeof one, &one) != 0) base::throw_errno("affinity");
  }

 private:
  cpu_set_t before_{};
};

}  // namespace syncbn::test

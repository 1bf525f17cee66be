#include <syncbn/base/heap.h>

#include <syncbn/base/env.h>

#include <algorithm>
#include <array>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace syncbn::base {

void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr std::array kUsersOwn = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
                                    "GLIBC_TUNABLES"};
  if (std::ranges::any_of(kUsersOwn, [](const char* name) { return env(name).has_value(); })) {
    return;
  }
  // No mappings for single blocks, which go with them, and no cutting of the heap's free end.
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

}  // namespace syncbn::base

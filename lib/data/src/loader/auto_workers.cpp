#include <sched.h>

#include <algorithm>

#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/data/loader.h>

namespace syncbn::data {

int automatic_workers() {
  constexpr int kMostRanks = 1 << 16;
  const int64_t host = base::available_cpus();
  cpu_set_t allowed;
  const bool known = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  const int64_t own = known ? CPU_COUNT(&allowed) : host;
  const int64_t ranks = base::env_int("LOCAL_WORLD_SIZE", 1, kMostRanks).value_or(1);
  return static_cast<int>(std::max<int64_t>(std::min(own, host / ranks) - 1, 1));
}

}  // namespace syncbn::data

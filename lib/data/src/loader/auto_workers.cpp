#include <algorithm>

#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/data/loader.h>

namespace syncbn::data {

int automatic_workers() {
  constexpr int kMaxRanks = 1 << 16;
  const auto ranks = base::env_int("LOCAL_WORLD_SIZE", 1, kMaxRanks).value_or(1);
  return std::max(base::cpus_of_rank(static_cast<int>(ranks)) - 1, 1);
}

}  // namespace syncbn::data

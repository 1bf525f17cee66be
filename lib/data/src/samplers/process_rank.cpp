#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/data/sampler.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace syncbn::data {

ProcessRank process_rank() {
  try {
    // lib/dist registers the default group under this name; this library does not depend on it.
    const auto group = c10d::resolve_process_group("syncbn");
    return {.rank = group->getRank(), .num_replicas = group->getSize()};
  } catch (const c10::Error&) {  // no default process group
  }
  constexpr int64_t kMaxRanks = 1 << 20;
  const auto given = base::env_int("WORLD_SIZE", 1, kMaxRanks);
  const int64_t size = given.value_or(1);
  const auto rank = base::env_int("RANK", 0, kMaxRanks - 1);
  if (rank ? *rank > 0 && !given : size > 1) {
    throw base::UserError(
        fmt::format("a sampler was told neither rank nor num_replicas, {} and {} is not set; call "
                    "init_process_group() first, or set both options",
                    rank ? fmt::format("RANK is {}", *rank) : fmt::format("WORLD_SIZE is {}", size),
                    rank ? "WORLD_SIZE" : "RANK"));
  }
  return {.rank = size > 1 ? static_cast<int>(*rank) : 0, .num_replicas = static_cast<int>(size)};
}

}  // namespace syncbn::data

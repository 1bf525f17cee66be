#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/data/sampler.h>

#include <optional>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace syncbn::data {
namespace {

/// Nothing without a default process group. lib/dist registers it under this name; this library
/// does not depend on lib/dist.
std::optional<ProcessRank> rank_in_group() {
  try {
    const auto group = c10d::resolve_process_group("syncbn");
    return ProcessRank{.rank = group->getRank(), .num_replicas = group->getSize()};
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

ProcessRank process_rank() {
  if (const auto found = rank_in_group()) return *found;
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

#pragma once

#include <cstdint>
#include <vector>

namespace syncbn::data {

/// The permutation of 0..size-1 that Python's torch.randperm draws from a generator that was seeded
/// with seed + epoch.
std::vector<int64_t> permutation(int64_t size, int64_t seed, int64_t epoch);

/// @throws base::UserError unless 0 <= rank < num_replicas.
void check_rank(int num_replicas, int rank);

}  // namespace syncbn::data

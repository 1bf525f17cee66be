#pragma once

#include <cstdint>
#include <vector>

// at::Generator.
#include <ATen/core/Generator.h>

namespace syncbn::data {

/// Seeded with seed + epoch.
at::Generator epoch_generator(int64_t seed, int64_t epoch);

/// The permutation of 0..size-1 that Python's torch.randperm draws from a generator that was seeded
/// with seed + epoch.
std::vector<int64_t> permutation(int64_t size, int64_t seed, int64_t epoch);

/// What rank `rank` of `num_replicas` gets of an order: every num_replicas-th from its own on, the
/// order being padded from its front to a multiple of the number of ranks.
std::vector<int64_t> deal(const std::vector<int64_t>& order, int num_replicas, int rank);

/// @throws base::UserError unless 0 <= rank < num_replicas.
void check_rank(int num_replicas, int rank);

}  // namespace syncbn::data

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace syncbn::data {

/// The permutation of 0..size-1 that Python's torch.randperm draws from a generator that was seeded
/// with seed + epoch.
std::vector<int64_t> permutation(int64_t size, int64_t seed, int64_t epoch);

/// How many samples each rank gets of `size`: all of them padded to a multiple of the ranks, or
/// with drop_last cut to one.
int64_t share_of(int64_t size, int num_replicas, bool drop_last);

/// `count` samples of a list for one rank: every num_replicas-th from the rank-th on; behind its
/// end the list goes on at its front.
std::vector<int64_t> deal(std::span<const int64_t> list, int num_replicas, int rank, int64_t count);

/// @throws base::UserError unless 0 <= rank < num_replicas.
void check_rank(int num_replicas, int rank);

}  // namespace syncbn::data

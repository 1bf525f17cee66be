#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace syncbn::data {

/// The numbers 0 to size - 1 in order, or shuffled as Python's torch.randperm does with a generator
/// of seed + epoch.
std::vector<int64_t> epoch_order(int64_t size, bool shuffle, int64_t seed, int64_t epoch);

/// What torch.Generator.manual_seed(seed + epoch) is given; a negative seed wraps around.
inline uint64_t generator_seed(int64_t seed, int64_t epoch) {
  return static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch);
}

/// The number of samples per rank if `size` samples are padded (or cut, with drop_last) to a
/// multiple of num_replicas.
int64_t samples_per_rank(int64_t size, int num_replicas, bool drop_last);

/// `count` elements of a list: rank, rank + num_replicas, ... After the end, the list continues
/// from its front.
std::vector<int64_t> shard_of(std::span<const int64_t> list, int num_replicas, int rank,
                              int64_t count);

/// @throws base::UserError unless 0 <= size and 0 <= rank < num_replicas.
void check_shard(int64_t size, int num_replicas, int rank);

}  // namespace syncbn::data

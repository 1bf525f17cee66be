#include <syncbn/data/shard_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/data/random.h>

#include "permutation.h"

namespace syncbn::data {

ShardSampler::ShardSampler(std::span<const int64_t> shard_ends, const ShardSamplerOptions& options)
    : ends_(shard_ends.begin(), shard_ends.end()), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (options.buffer_size < 1 || options.streams < 1) {
    throw base::UserError(
        fmt::format("shard sampler: buffer_size {} and streams {} must be at least 1",
                    options.buffer_size, options.streams));
  }
  if (!std::ranges::is_sorted(ends_) || (!ends_.empty() && ends_.front() < 0)) {
    throw base::UserError("shard sampler: a shard ends before the one in front of it");
  }
}

int64_t ShardSampler::size() const {
  return share_of(dataset_size(), options_.num_replicas, options_.drop_last);
}

std::vector<int64_t> ShardSampler::indices() const {
  return order(/*mixed=*/options_.shuffle);
}

std::vector<int64_t> ShardSampler::storage_order() const {
  return order(/*mixed=*/false);
}

/// Half more than is mixed at a time, so that what is mixed next comes in one after the other.
int64_t ShardSampler::read_ahead() const {
  return (options_.buffer_size + options_.buffer_size / 2) / options_.num_replicas + 1;
}

std::vector<int64_t> ShardSampler::shard_by_shard() const {
  std::vector<int64_t> shards(ends_.size());
  std::iota(shards.begin(), shards.end(), 0);
  if (options_.shuffle) shards = permutation(std::ssize(ends_), options_.seed, epoch());
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(dataset_size()));
  for (const int64_t shard : shards) {
    const auto at = static_cast<size_t>(shard);
    for (int64_t i = at == 0 ? 0 : ends_[at - 1]; i < ends_[at]; ++i) samples.push_back(i);
  }
  return samples;
}

/// Fisher and Yates's shuffle of one buffer after the other.
void ShardSampler::mix(std::span<int64_t> part, int64_t stream) const {
  const auto buffer =
      static_cast<size_t>(std::max<int64_t>(options_.buffer_size / options_.streams, 1));
  for (size_t begin = 0; begin < part.size(); begin += buffer) {
    const auto mixed = part.subspan(begin, std::min(buffer, part.size() - begin));
    // Below 0, where no sample's own random numbers are.
    constexpr int kBitsOfPlace = 40;
    const int64_t key = ~(stream << kBitsOfPlace | static_cast<int64_t>(begin));
    SampleRandom random(options_.seed, epoch(), key);
    for (size_t i = mixed.size(); i > 1; --i) {
      std::swap(mixed[i - 1], mixed[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    }
  }
}

std::vector<int64_t> ShardSampler::order(bool mixed) const {
  std::vector<int64_t> samples = shard_by_shard();
  const auto streams = static_cast<size_t>(options_.streams);
  std::vector<int64_t> list(samples.size());
  size_t begin = 0;
  for (size_t stream = 0; stream < streams; ++stream) {
    const size_t length = samples.size() / streams + (stream < samples.size() % streams ? 1 : 0);
    const auto part = std::span(samples).subspan(begin, length);
    if (mixed) mix(part, static_cast<int64_t>(stream));
    for (size_t i = 0; i < length; ++i) list[i * streams + stream] = part[i];
    begin += length;
  }
  return deal(list, options_.num_replicas, options_.rank, size());
}

}  // namespace syncbn::data

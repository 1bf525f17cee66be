#include <syncbn/data/shard_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/data/random.h>

#include "samplers/order.h"

namespace syncbn::data {
namespace {

void check_range(const char* name, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return;
  throw base::UserError(
      fmt::format("shard sampler: {} must be from 1 to {}, got {}", name, max, value));
}

}  // namespace

ShardSampler::ShardSampler(std::span<const int64_t> shard_ends, const ShardSamplerOptions& options)
    : ends_(shard_ends.begin(), shard_ends.end()), options_(options) {
  check_shard(/*size=*/0, options.num_replicas, options.rank);
  check_range("buffer_size", options.buffer_size, ShardSamplerOptions::kMaxBufferSize);
  check_range("streams", options.streams, ShardSamplerOptions::kMaxStreams);
  if (!std::ranges::is_sorted(ends_) || (!ends_.empty() && ends_.front() < 0)) {
    throw base::UserError("shard sampler: a shard ends before the one in front of it");
  }
}

int64_t ShardSampler::size() const {
  return samples_per_rank(dataset_size(), options_.num_replicas, options_.drop_last);
}

std::string ShardSampler::order_name() const {
  return fmt::format("shards, shuffle {}, buffer_size {}, streams {}", options_.shuffle,
                     options_.buffer_size, options_.streams);
}

std::vector<int64_t> ShardSampler::indices() const {
  return shard_of(global_list(options_.shuffle), options_.num_replicas, options_.rank, size());
}

std::vector<int64_t> ShardSampler::storage_order(std::span<const int64_t> indices) const {
  std::vector<int64_t> shard(indices.begin(), indices.end());
  const std::vector<int64_t> list = global_list(/*shuffled=*/false);
  std::vector<size_t> place(list.size());
  for (size_t i = 0; i < list.size(); ++i) place[static_cast<size_t>(list[i])] = i;
  // Padding stays at the end.
  const int64_t replicas = options_.num_replicas;
  const int64_t own = std::min((dataset_size() - options_.rank + replicas - 1) / replicas, size());
  std::ranges::sort(shard.begin(), shard.begin() + own, {},
                    [&](int64_t sample) { return place[static_cast<size_t>(sample)]; });
  return shard;
}

// One and a half buffers: while one is consumed in random order, the next is read sequentially.
int64_t ShardSampler::read_ahead() const {
  return (options_.buffer_size + options_.buffer_size / 2) / options_.num_replicas + 1;
}

std::vector<int64_t> ShardSampler::shard_by_shard() const {
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(dataset_size()));
  const auto shards = epoch_order(std::ssize(ends_), options_.shuffle, options_.seed, epoch());
  for (const int64_t shard : shards) {
    const auto at = static_cast<size_t>(shard);
    for (int64_t i = at == 0 ? 0 : ends_[at - 1]; i < ends_[at]; ++i) samples.push_back(i);
  }
  return samples;
}

void ShardSampler::shuffle_part(std::span<int64_t> part, int64_t stream) const {
  const auto buffer_size =
      static_cast<size_t>(std::max<int64_t>(options_.buffer_size / options_.streams, 1));
  for (size_t begin = 0; begin < part.size(); begin += buffer_size) {
    const auto buffer = part.subspan(begin, std::min(buffer_size, part.size() - begin));
    // Negative, so no key of an augmentation (a sample's index) is the same.
    constexpr int kBitsOfBegin = 40;
    const int64_t key = ~(stream << kBitsOfBegin | static_cast<int64_t>(begin));
    SampleRandom random(options_.seed, epoch(), key);
    for (size_t i = buffer.size(); i > 1; --i) {  // Fisher and Yates
      std::swap(buffer[i - 1], buffer[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    }
  }
}

std::vector<int64_t> ShardSampler::global_list(bool shuffled) const {
  std::vector<int64_t> samples = shard_by_shard();
  const size_t streams = std::min(static_cast<size_t>(options_.streams), samples.size());
  std::vector<int64_t> list(samples.size());
  size_t begin = 0;
  for (size_t stream = 0; stream < streams; ++stream) {
    const size_t length = samples.size() / streams + (stream < samples.size() % streams ? 1 : 0);
    const auto part = std::span(samples).subspan(begin, length);
    if (shuffled) shuffle_part(part, static_cast<int64_t>(stream));
    for (size_t i = 0; i < length; ++i) list[i * streams + stream] = part[i];
    begin += length;
  }
  return list;
}

}  // namespace syncbn::data

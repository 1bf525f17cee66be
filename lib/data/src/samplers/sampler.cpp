#include <syncbn/data/sampler.h>

// at::detail::createCPUGenerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/random.h>
#include <syncbn/data/shard_sampler.h>

namespace syncbn::data {
namespace {

/// The argument of torch.Generator.manual_seed(seed + epoch); a negative sum wraps around.
uint64_t generator_seed(int64_t seed, int64_t epoch) {
  return static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch);
}

/// The numbers 0 to size - 1 in order, or shuffled as Python's torch.randperm does with a generator
/// of seed + epoch.
std::vector<int64_t> epoch_order(int64_t size, bool shuffle, int64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  if (!shuffle) {
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  const at::Tensor permutation =
      at::randperm(size, at::detail::createCPUGenerator(generator_seed(seed, epoch)), at::kLong);
  std::copy_n(permutation.const_data_ptr<int64_t>(), size, order.begin());
  return order;
}

/// The number of samples per rank if `size` samples are padded (or cut, with drop_last) to a
/// multiple of num_replicas.
int64_t samples_per_rank(int64_t size, int num_replicas, bool drop_last) {
  // With drop_last, if W does not divide N, PyTorch computes ceil((N - W) / W) = floor(N / W).
  return size / num_replicas + (!drop_last && size % num_replicas != 0 ? 1 : 0);
}

/// The first `count` of the elements rank, rank + num_replicas, ... of a list, which continues from
/// its front after its end.
std::vector<int64_t> shard_of(std::span<const int64_t> list, int num_replicas, int rank,
                              int64_t count) {
  std::vector<int64_t> shard;
  shard.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    shard.push_back(list[static_cast<size_t>((rank + i * num_replicas) % std::ssize(list))]);
  }
  return shard;
}

void check_shard(int64_t size, int num_replicas, int rank) {
  if (num_replicas < 1 || rank < 0 || rank >= num_replicas) {
    throw base::UserError(
        fmt::format("a sampler was made for rank {} of {}; ranks are numbered from 0", rank,
                    base::counted(num_replicas, "rank")));
  }
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
}

template <class Options>
Options with_rank(Options options) {
  if (options.num_replicas && options.rank) return options;
  const ProcessRank own = process_rank();
  options.num_replicas = options.num_replicas.value_or(own.num_replicas);
  options.rank = options.rank.value_or(own.rank);
  return options;
}

void check_range(const char* name, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return;
  throw base::UserError(
      fmt::format("shard sampler: {} must be from 1 to {}, got {}", name, max, value));
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t size, const DistributedSamplerOptions& options)
    : RankedSampler(with_rank(options)), dataset_size_(size) {
  check_shard(size, *options_.num_replicas, *options_.rank);
  num_samples_ = samples_per_rank(size, *options_.num_replicas, options.drop_last);
}

std::string DistributedSampler::order_name() const {
  return fmt::format("distributed, shuffle {}", options_.shuffle);
}

std::vector<int64_t> DistributedSampler::indices() const {
  if (options_.shuffle && ++shuffles_ == 2 && !epoch_was_set()) {
    spdlog::warn(
        "DistributedSampler: set_epoch() was never called, so this epoch has the order of the one "
        "before; call it with the epoch's number before each epoch");
  }
  return shard_of(epoch_order(dataset_size_, options_.shuffle, options_.seed, epoch()),
                  *options_.num_replicas, *options_.rank, num_samples_);
}

SequentialShardSampler::SequentialShardSampler(int64_t size, int num_replicas, int rank)
    : dataset_size_(size), num_replicas_(num_replicas), rank_(rank) {
  check_shard(size, num_replicas, rank);
}

std::vector<int64_t> SequentialShardSampler::indices() const {
  std::vector<int64_t> shard;
  shard.reserve(static_cast<size_t>(size()));
  for (int64_t i = rank_; i < dataset_size_; i += num_replicas_) shard.push_back(i);
  return shard;
}

int64_t SequentialShardSampler::size() const {
  return dataset_size_ / num_replicas_ + (rank_ < dataset_size_ % num_replicas_ ? 1 : 0);
}

ClassSkewedSampler::ClassSkewedSampler(std::span<const int64_t> labels,
                                       const ClassSkewedSamplerOptions& options)
    : RankedSampler(with_rank(options)) {
  const int replicas = *options_.num_replicas;
  check_shard(std::ssize(labels), replicas, *options_.rank);
  std::vector<int64_t> sizes(static_cast<size_t>(replicas));
  std::set<int64_t> present;
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0) {
      throw base::UserError(fmt::format(
          "class_skewed sampler: sample {} has the label {}; labels count from 0", i, labels[i]));
    }
    const int64_t owner = labels[i] % replicas;
    ++sizes[static_cast<size_t>(owner)];
    present.insert(labels[i]);
    if (owner == *options_.rank) shard_.push_back(static_cast<int64_t>(i));
  }
  const auto empty = std::ranges::find(sizes, 0);
  if (empty != sizes.end()) {
    throw base::UserError(fmt::format(
        "class_skewed sampler: rank {1} of {0} has no sample: it takes the labels y with y % {0} "
        "== {1}, and the labels are {2}; start fewer ranks or use the distributed sampler",
        replicas, empty - sizes.begin(),
        present.empty() ? "none" : fmt::format("{}", fmt::join(present, ", "))));
  }
  padded_size_ = std::ranges::max(sizes);
}

std::string ClassSkewedSampler::order_name() const {
  // Unlike in other samplers, the number of ranks decides which samples form a global batch.
  return fmt::format("class_skewed, shuffle {}, {}", options_.shuffle,
                     base::counted(*options_.num_replicas, "rank"));
}

std::vector<int64_t> ClassSkewedSampler::indices() const {
  std::vector<int64_t> order =
      epoch_order(std::ssize(shard_), options_.shuffle, options_.seed, epoch());
  for (int64_t& i : order) i = shard_[static_cast<size_t>(i)];
  return shard_of(order, /*num_replicas=*/1, /*rank=*/0, padded_size_);
}

WeightedSampler::WeightedSampler(std::vector<double> weights, const WeightedSamplerOptions& options)
    : RankedSampler(with_rank(options)), weights_(std::move(weights)) {
  constexpr size_t kMaxWeights = size_t{1} << 24;  // torch.multinomial's
  if (options_.num_samples == 0) options_.num_samples = std::ssize(weights_);
  if (options_.num_samples < 0) {
    throw base::UserError(
        fmt::format("weighted sampler: {} samples cannot be drawn", options_.num_samples));
  }
  check_shard(options_.num_samples, *options_.num_replicas, *options_.rank);
  base::Fnv1a hash;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] < 0 || !std::isfinite(weights_[i])) {
      throw base::UserError(fmt::format(
          "weighted sampler: sample {} has the weight {}; weights are finite and not negative", i,
          weights_[i]));
    }
    hash.add(std::bit_cast<uint64_t>(weights_[i]));
  }
  weights_hash_ = hash.value();
  if (weights_.size() > kMaxWeights) {
    throw base::UserError(fmt::format("weighted sampler: {} weights; at most {} are possible",
                                      weights_.size(), kMaxWeights));
  }
  const auto possible = std::ranges::count_if(weights_, [](double weight) { return weight > 0; });
  if (possible == 0) throw base::UserError("weighted sampler: no weight is above 0");
  if (!options_.replacement && options_.num_samples > possible) {
    throw base::UserError(
        fmt::format("weighted sampler: {} cannot be drawn without replacement from {} "
                    "whose weight is above 0",
                    base::counted(options_.num_samples, "sample"), possible));
  }
}

std::string WeightedSampler::order_name() const {
  return fmt::format("weighted, replacement {}, num_samples {}, weights {:016x}",
                     options_.replacement, options_.num_samples, weights_hash_);
}

int64_t WeightedSampler::size() const {
  return samples_per_rank(options_.num_samples, *options_.num_replicas, /*drop_last=*/false);
}

std::vector<int64_t> WeightedSampler::indices() const {
  const at::Tensor drawn =
      at::multinomial(at::tensor(weights_, at::kDouble), options_.num_samples, options_.replacement,
                      at::detail::createCPUGenerator(generator_seed(options_.seed, epoch())));
  const std::span list(drawn.const_data_ptr<int64_t>(), static_cast<size_t>(options_.num_samples));
  if (options_.replacement) {
    std::vector<int64_t> times(weights_.size());
    std::vector<int64_t> copies;
    copies.reserve(list.size());
    for (const int64_t sample : list) copies.push_back(times[static_cast<size_t>(sample)]++);
    copies_ = shard_of(copies, *options_.num_replicas, *options_.rank, size());
  }
  return shard_of(list, *options_.num_replicas, *options_.rank, size());
}

int64_t WeightedSampler::copy_at(int64_t place) const {
  // A loader may pad by one more place.
  return place < std::ssize(copies_) ? copies_[static_cast<size_t>(place)] : 0;
}

RepeatedAugmentationSampler::RepeatedAugmentationSampler(
    int64_t size, const RepeatedAugmentationSamplerOptions& options)
    : RankedSampler(with_rank(options)), dataset_size_(size) {
  check_shard(size, *options_.num_replicas, *options_.rank);
  if (options.repetitions < 1 || options.selected_round < 0) {
    throw base::UserError(fmt::format(
        "repeated augmentation: repetitions {} must be at least 1, selected_round {} at least 0",
        options.repetitions, options.selected_round));
  }
  const int64_t replicas = *options_.num_replicas;
  const int64_t round = options.selected_round;
  num_selected_ = round > 0 ? size / round * round / replicas : (size + replicas - 1) / replicas;
  if (num_selected_ == 0) {
    throw base::UserError(
        fmt::format("repeated augmentation: {}, rounded down to a multiple of selected_round {}, "
                    "are not enough for {}; set selected_round to 0",
                    base::counted(size, "sample"), round, base::counted(replicas, "rank")));
  }
}

std::string RepeatedAugmentationSampler::order_name() const {
  return fmt::format("repeated_augmentation, shuffle {}, repetitions {}", options_.shuffle,
                     options_.repetitions);
}

std::vector<int64_t> RepeatedAugmentationSampler::indices() const {
  const auto order = epoch_order(dataset_size_, options_.shuffle, options_.seed, epoch());
  std::vector<int64_t> shard;
  shard.reserve(static_cast<size_t>(num_selected_));
  // The list of all ranks has each sample `repetitions` times in a row.
  for (int64_t i = 0; i < num_selected_; ++i) {
    const int64_t sample = (*options_.rank + i * *options_.num_replicas) / options_.repetitions;
    shard.push_back(order[static_cast<size_t>(sample % dataset_size_)]);
  }
  return shard;
}

int64_t RepeatedAugmentationSampler::copy_at(int64_t place) const {
  return (*options_.rank + place * *options_.num_replicas) % options_.repetitions;
}

ShardSampler::ShardSampler(std::span<const int64_t> shard_ends, const ShardSamplerOptions& options)
    : RankedSampler(with_rank(options)), ends_(shard_ends.begin(), shard_ends.end()) {
  check_shard(/*size=*/0, *options_.num_replicas, *options_.rank);
  check_range("buffer_size", options.buffer_size, ShardSamplerOptions::kMaxBufferSize);
  check_range("streams", options.streams, ShardSamplerOptions::kMaxStreams);
  if (!std::ranges::is_sorted(ends_) || (!ends_.empty() && ends_.front() < 0)) {
    throw base::UserError("shard sampler: a shard ends before the one in front of it");
  }
}

int64_t ShardSampler::size() const {
  return samples_per_rank(dataset_size(), *options_.num_replicas, options_.drop_last);
}

std::string ShardSampler::order_name() const {
  return fmt::format("shards, shuffle {}, buffer_size {}, streams {}", options_.shuffle,
                     options_.buffer_size, options_.streams);
}

std::vector<int64_t> ShardSampler::indices() const {
  return shard_of(global_list(options_.shuffle), *options_.num_replicas, *options_.rank, size());
}

std::vector<int64_t> ShardSampler::storage_order(std::span<const int64_t> indices) const {
  std::vector<int64_t> shard(indices.begin(), indices.end());
  const std::vector<int64_t> list = global_list(/*shuffled=*/false);
  std::vector<size_t> place(list.size());
  for (size_t i = 0; i < list.size(); ++i) place[static_cast<size_t>(list[i])] = i;
  // Padding stays at the end.
  const int64_t replicas = *options_.num_replicas;
  const int64_t own = std::min((dataset_size() - *options_.rank + replicas - 1) / replicas, size());
  std::ranges::sort(shard.begin(), shard.begin() + own, {},
                    [&](int64_t sample) { return place[static_cast<size_t>(sample)]; });
  return shard;
}

// One and a half buffers: while one is consumed in random order, the next is read sequentially.
int64_t ShardSampler::read_ahead() const {
  return (options_.buffer_size + options_.buffer_size / 2) / *options_.num_replicas + 1;
}

void ShardSampler::shuffle_part(std::span<int64_t> part, int64_t stream) const {
  const auto buffer_size =
      static_cast<size_t>(std::max<int64_t>(options_.buffer_size / options_.streams, 1));
  for (size_t begin = 0; begin < part.size(); begin += buffer_size) {
    const auto buffer = part.subspan(begin, std::min(buffer_size, part.size() - begin));
    // Negative, so that it differs from every key of an augmentation (a sample's index).
    constexpr int kBitsOfBegin = 40;
    const int64_t key = ~(stream << kBitsOfBegin | static_cast<int64_t>(begin));
    SampleRandom random(options_.seed, epoch(), key);
    for (size_t i = buffer.size(); i > 1; --i) {  // Fisher and Yates
      std::swap(buffer[i - 1], buffer[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    }
  }
}

std::vector<int64_t> ShardSampler::global_list(bool shuffled) const {
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(dataset_size()));
  for (const int64_t shard :
       epoch_order(std::ssize(ends_), options_.shuffle, options_.seed, epoch())) {
    const auto at = static_cast<size_t>(shard);
    for (int64_t i = at == 0 ? 0 : ends_[at - 1]; i < ends_[at]; ++i) samples.push_back(i);
  }
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

#include <syncbn/data/sampler.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>

#include "samplers/order.h"

namespace syncbn::data {

DistributedSampler::DistributedSampler(int64_t size, const DistributedSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_shard(size, options.num_replicas, options.rank);
  num_samples_ = samples_per_rank(size, options.num_replicas, options.drop_last);
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
                  options_.num_replicas, options_.rank, num_samples_);
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
    : options_(options) {
  const int replicas = options.num_replicas;
  check_shard(std::ssize(labels), replicas, options.rank);
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
    if (owner == options.rank) shard_.push_back(static_cast<int64_t>(i));
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
                     base::counted(options_.num_replicas, "rank"));
}

std::vector<int64_t> ClassSkewedSampler::indices() const {
  std::vector<int64_t> order =
      epoch_order(std::ssize(shard_), options_.shuffle, options_.seed, epoch());
  for (int64_t& i : order) i = shard_[static_cast<size_t>(i)];
  return shard_of(order, /*num_replicas=*/1, /*rank=*/0, padded_size_);
}

WeightedSampler::WeightedSampler(std::vector<double> weights, const WeightedSamplerOptions& options)
    : weights_(std::move(weights)), options_(options) {
  constexpr size_t kMaxWeights = size_t{1} << 24;  // torch.multinomial's
  if (options_.num_samples == 0) options_.num_samples = std::ssize(weights_);
  if (options_.num_samples < 0) {
    throw base::UserError(
        fmt::format("weighted sampler: {} samples cannot be drawn", options_.num_samples));
  }
  check_shard(options_.num_samples, options.num_replicas, options.rank);
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
  return samples_per_rank(options_.num_samples, options_.num_replicas, /*drop_last=*/false);
}

std::vector<int64_t> WeightedSampler::indices() const {
  const at::Tensor drawn =
      at::multinomial(at::tensor(weights_, at::kDouble), options_.num_samples, options_.replacement,
                      at::detail::createCPUGenerator(generator_seed(options_.seed, epoch())));
  return shard_of({drawn.const_data_ptr<int64_t>(), static_cast<size_t>(options_.num_samples)},
                  options_.num_replicas, options_.rank, size());
}

RepeatedAugmentationSampler::RepeatedAugmentationSampler(
    int64_t size, const RepeatedAugmentationSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_shard(size, options.num_replicas, options.rank);
  if (options.repetitions < 1 || options.selected_round < 0) {
    throw base::UserError(fmt::format(
        "repeated augmentation: repetitions {} must be at least 1, selected_round {} at least 0",
        options.repetitions, options.selected_round));
  }
  const int64_t replicas = options.num_replicas;
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
    const int64_t sample = (options_.rank + i * options_.num_replicas) / options_.repetitions;
    shard.push_back(order[static_cast<size_t>(sample % dataset_size_)]);
  }
  return shard;
}

int64_t RepeatedAugmentationSampler::copy_at(int64_t place) const {
  return (options_.rank + place * options_.num_replicas) % options_.repetitions;
}

}  // namespace syncbn::data

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::data {

/// Where a run is in its data: all that is needed to go on with the very next sample. Plain values,
/// for a checkpoint to hold.
struct SamplerState {
  /// 2 since there is `order`.
  static constexpr int64_t kVersion = 2;

  int64_t version = kVersion;
  int64_t seed = 0;
  int64_t epoch = 0;
  /// Samples that all ranks together have taken in this epoch, so that a run can go on with
  /// another number of ranks.
  int64_t consumed = 0;
  /// Dataset::fingerprint(), bit for bit.
  int64_t fingerprint = 0;
  /// Sampler::order_name(); empty: not known, as in states of version 1.
  std::string order = {};
};

/// Chooses which samples this rank sees in an epoch, and in which order.
/// The order is a function of (seed, epoch) alone. Not thread-safe.
class Sampler {
 public:
  virtual ~Sampler() = default;

  /// This rank's sample numbers in the present epoch.
  virtual std::vector<int64_t> indices() const = 0;

  /// The length of indices(), the same in every epoch.
  virtual int64_t size() const = 0;

  virtual int num_replicas() const = 0;
  virtual int64_t seed() const = 0;

  /// What the order of all ranks' samples depends on besides data set, seed and epoch, in words for
  /// messages: "shards, shuffle true, buffer_size 10000, streams 16". A run that goes on in the
  /// middle of an epoch has to have the same. Where an order ends (drop_last) is no part of it.
  virtual std::string order_name() const { return {}; }

  /// Which repetition of its sample the `place`-th of indices() is, where a sampler gives samples
  /// several times; augmentations differ between them.
  virtual int64_t copy_at([[maybe_unused]] int64_t place) const { return 0; }

  /// Where samples are read from large files: `indices`, which indices() gave in this epoch, as
  /// they lie there, each within read_ahead() places of where it was. Otherwise empty.
  virtual std::vector<int64_t> storage_order(
      [[maybe_unused]] std::span<const int64_t> indices) const {
    return {};
  }
  /// How far storage should be ahead of what is read, in samples of storage_order().
  virtual int64_t read_ahead() const { return 0; }

  /// Call it before each epoch, or every epoch has the first one's order.
  void set_epoch(int64_t epoch) {
    epoch_ = epoch;
    epoch_was_set_ = true;
  }
  int64_t epoch() const { return epoch_; }

 protected:
  bool epoch_was_set() const { return epoch_was_set_; }

 private:
  int64_t epoch_ = 0;
  bool epoch_was_set_ = false;
};

/// Every sample exactly once over all ranks, in order and without padding: rank r takes r, r + W,
/// r + 2W, ... Ranks may differ by one sample. For exact evaluation.
class SequentialShardSampler : public Sampler {
 public:
  /// @throws base::UserError for a negative size or a rank outside [0, num_replicas).
  SequentialShardSampler(int64_t size, int num_replicas, int rank);

  std::vector<int64_t> indices() const override;
  int64_t size() const override;
  int num_replicas() const override { return num_replicas_; }
  int64_t seed() const override { return 0; }
  std::string order_name() const override { return "sequential"; }

 private:
  int64_t dataset_size_;
  int num_replicas_;
  int rank_;
};

struct ClassSkewedSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
};

/// Rank r of W sees only the samples whose label y has y % W == r, as happens when data sits where
/// it was collected.
///
/// Shards of unequal size are padded to the longest by repeating from their front, so that all
/// ranks run the same number of steps.
class ClassSkewedSampler : public Sampler {
 public:
  /// @throws base::UserError when any rank, not only this one, would be left without a sample:
  ///   names the rank, the number of ranks and the labels there are; for a negative label; for a
  ///   rank outside [0, num_replicas).
  ClassSkewedSampler(std::span<const int64_t> labels, const ClassSkewedSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return padded_size_; }
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }
  std::string order_name() const override;

 private:
  ClassSkewedSamplerOptions options_;
  std::vector<int64_t> shard_;
  int64_t padded_size_ = 0;
};

struct WeightedSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  int64_t seed = 0;
  /// Draws of all ranks together; 0: as many as there are weights.
  int64_t num_samples = 0;
  bool replacement = true;
};

/// Draws samples with probabilities in proportion to their weights. All ranks draw the list of
/// torch.utils.data.WeightedRandomSampler with a generator of seed + epoch; rank r takes every
/// num_replicas-th from the r-th on, and the list is padded from its front to equal shares.
class WeightedSampler : public Sampler {
 public:
  /// @throws base::UserError when a weight is negative or not finite, when all are 0, when there
  ///   are more than 2^24 (torch.multinomial's limit), or, without replacement, when fewer than
  ///   num_samples are above 0; for a rank outside [0, num_replicas).
  WeightedSampler(std::vector<double> weights, const WeightedSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override;
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }
  std::string order_name() const override;

 private:
  std::vector<double> weights_;
  WeightedSamplerOptions options_;
  uint64_t hash_of_weights_ = 0;
};

struct RepeatedAugmentationSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
  int64_t repetitions = 3;
  /// An epoch has the data set's size, cut to a multiple of this; 0: not cut.
  int64_t selected_round = 256;
};

/// Repeated augmentation (Hoffer et al., "Augment your batch", 2020): each sample several times in
/// a row, which goes to as many ranks and is augmented differently on each; an epoch is as long as
/// without. The order of torchvision's reference RASampler and of timm's.
class RepeatedAugmentationSampler : public Sampler {
 public:
  /// @throws base::UserError for a negative size, repetitions below 1, a rank outside
  ///   [0, num_replicas), and when selected_round leaves a rank without a sample.
  RepeatedAugmentationSampler(int64_t size, const RepeatedAugmentationSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return num_selected_; }
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }
  std::string order_name() const override;
  int64_t copy_at(int64_t place) const override;

 private:
  int64_t dataset_size_;
  RepeatedAugmentationSamplerOptions options_;
  int64_t num_selected_;
};

/// What a sampler is made from besides its own options.
struct SamplerArgs {
  int64_t size = 0;                      ///< samples in the data set
  std::span<const int64_t> labels = {};  ///< of every sample; empty where the data set has none
  int num_replicas = 1;
  int rank = 0;
  int64_t seed = 0;
  std::span<const int64_t> shard_ends = {};  ///< Dataset::shard_ends()
};

/// The registry behind `sampler: {type: distributed}`. Knows:
///   distributed   torch.utils.data.DistributedSampler's order (shuffle, drop_last)
///   class_skewed  ClassSkewedSampler (shuffle)
///   weighted      WeightedSampler (class_weights, replacement)
///   repeated_augmentation   RepeatedAugmentationSampler (shuffle, repetitions, selected_round)
///   shards        ShardSampler (shuffle, drop_last, buffer_size, streams)
/// make() throws base::UserError when a rank would have no sample of its own; the check is the same
/// on every rank, so any one process can make it for all.
struct SamplerKind {
  using Registry = config::Registry<std::shared_ptr<Sampler>, const SamplerArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::data

#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::data {

/// A run's position in its data, in plain values for a checkpoint.
struct SamplerState {
  /// Version 2 added `order`.
  static constexpr int64_t kVersion = 2;

  int64_t version = kVersion;
  int64_t seed = 0;
  int64_t epoch = 0;
  /// Samples of this epoch that all ranks together have consumed.
  int64_t consumed = 0;
  /// Dataset::fingerprint(), bit for bit.
  int64_t fingerprint = 0;
  /// Sampler::order_name(); empty if unknown, as in version 1.
  std::string order = {};
};

struct ProcessRank {
  int rank = 0;
  int num_replicas = 1;
};

/// This process's rank, for samplers without explicit ranks: from the default process group, or
/// else from RANK and WORLD_SIZE, or else 0 of 1. Thread-safe.
/// @throws base::UserError if WORLD_SIZE is above 1 and RANK is not set, or RANK is above 0 and
///   WORLD_SIZE is not set
ProcessRank process_rank();

/// Chooses which samples this rank sees in an epoch, and in which order, as a function of
/// (seed, epoch) alone. Not thread-safe.
class Sampler {
 public:
  virtual ~Sampler() = default;

  /// The indices of this rank's samples in the current epoch.
  virtual std::vector<int64_t> indices() const = 0;

  /// The length of indices(), the same in every epoch.
  virtual int64_t size() const = 0;

  virtual int num_replicas() const = 0;
  virtual int64_t seed() const = 0;

  /// This rank's share of a list.
  struct Share {
    int rank = 0;
    int64_t list_size = 0;
  };
  /// Set if indices() are the elements r, r + W, r + 2W, ... of a list that does not depend on the
  /// number W of ranks, padded or cut at its end: a run can then resume in the middle of an epoch
  /// on any number of ranks.
  virtual std::optional<Share> share() const { return std::nullopt; }

  /// Everything that the order of all ranks' samples depends on besides data set, seed and epoch:
  /// "shards, shuffle true, buffer_size 10000, streams 16". A run can resume in the middle of an
  /// epoch only if this is unchanged. drop_last is not part of it: it only cuts off the end.
  virtual std::string order_name() const { return {}; }

  /// The repetition number of indices()[place], for samplers that give a sample several times.
  /// Repetitions are augmented differently. Call it after indices(), in the same epoch.
  virtual int64_t copy_at(int64_t /*place*/) const { return 0; }

  /// For samples in large files: `indices` (the result of indices() in this epoch) in the files'
  /// order. Each moves by at most read_ahead() positions. Otherwise empty.
  virtual std::vector<int64_t> storage_order(std::span<const int64_t> /*indices*/) const {
    return {};
  }
  /// How many samples of storage_order() to prefetch beyond those being read.
  virtual int64_t read_ahead() const { return 0; }

  /// Call this before each epoch; otherwise every epoch has the order of epoch 0.
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

/// A sampler with the options num_replicas, rank and seed.
template <class Options>
class RankedSampler : public Sampler {
 public:
  int num_replicas() const override { return *options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }

 protected:
  /// @pre num_replicas and rank are set
  explicit RankedSampler(const Options& options) : options_(options) {}

  Options options_;
};

/// Every sample exactly once over all ranks, in order and without padding, for exact evaluation:
/// rank r of W takes r, r + W, r + 2W, ... The sizes of two ranks differ by at most one.
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
  std::optional<int> num_replicas = std::nullopt;  ///< defaults to process_rank(), as does `rank`
  std::optional<int> rank = std::nullopt;
  bool shuffle = true;
  int64_t seed = 0;

  static void describe(config::Schema<ClassSkewedSamplerOptions>& schema);
};

/// Rank r of W sees only the samples whose label y has y % W == r, as if each rank had collected
/// its own data. Shorter shards repeat from their front up to the length of the longest, so that
/// all ranks run the same number of steps.
class ClassSkewedSampler : public RankedSampler<ClassSkewedSamplerOptions> {
 public:
  /// @throws base::UserError if any rank, not only this one, has no sample; for a negative label;
  ///   for a rank outside [0, num_replicas).
  ClassSkewedSampler(std::span<const int64_t> labels, const ClassSkewedSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return padded_size_; }
  std::string order_name() const override;
  int64_t copy_at(int64_t place) const override { return place / std::ssize(shard_); }

 private:
  std::vector<int64_t> shard_;
  int64_t padded_size_ = 0;
};

struct WeightedSamplerOptions {
  std::optional<int> num_replicas = std::nullopt;  ///< defaults to process_rank(), as does `rank`
  std::optional<int> rank = std::nullopt;
  int64_t seed = 0;
  /// Number of draws over all ranks; 0: the number of weights.
  int64_t num_samples = 0;
  bool replacement = true;
};

/// Draws samples with probabilities in proportion to their weights. Every rank draws the same list,
/// that of torch.utils.data.WeightedRandomSampler with a generator of seed + epoch, pads it from
/// its front to a multiple of W = num_replicas, and takes the elements r, r + W, r + 2W, ...
class WeightedSampler : public RankedSampler<WeightedSamplerOptions> {
 public:
  /// @throws base::UserError if a weight is negative or not finite, if all are 0, if there are more
  ///   than 2^24 (torch.multinomial's limit), or, without replacement, if fewer than num_samples
  ///   are above 0; for a rank outside [0, num_replicas).
  WeightedSampler(std::vector<double> weights, const WeightedSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override;
  std::optional<Share> share() const override {
    return Share{*options_.rank, options_.num_samples};
  }
  std::string order_name() const override;
  int64_t copy_at(int64_t place) const override;

 private:
  std::vector<double> weights_;
  uint64_t weights_hash_ = 0;
  /// With replacement: copy_at() for the last indices().
  mutable std::vector<int64_t> copies_;
};

struct RepeatedAugmentationSamplerOptions {
  std::optional<int> num_replicas = std::nullopt;  ///< defaults to process_rank(), as does `rank`
  std::optional<int> rank = std::nullopt;
  bool shuffle = true;
  int64_t seed = 0;
  int64_t repetitions = 3;
  /// An epoch has as many samples as the data set, rounded down to a multiple of this; 0: not
  /// rounded.
  int64_t selected_round = 256;

  static void describe(config::Schema<RepeatedAugmentationSamplerOptions>& schema);
};

/// Repeated augmentation (Hoffer et al., "Augment your batch", 2020): `repetitions` ranks get the
/// same sample and augment it differently. Epochs do not become longer. The order is that of the
/// RASampler of torchvision's reference training and of timm.
class RepeatedAugmentationSampler : public RankedSampler<RepeatedAugmentationSamplerOptions> {
 public:
  /// @throws base::UserError for a negative size, repetitions below 1, a rank outside
  ///   [0, num_replicas), or a selected_round that leaves a rank without a sample.
  RepeatedAugmentationSampler(int64_t size, const RepeatedAugmentationSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return num_selected_; }
  std::optional<Share> share() const override {
    return Share{*options_.rank, num_selected_ * *options_.num_replicas};
  }
  std::string order_name() const override;
  int64_t copy_at(int64_t place) const override;

 private:
  int64_t dataset_size_;
  int64_t num_selected_;
};

/// Arguments of the registry's samplers, besides their options.
struct SamplerArgs {
  int64_t size = 0;                      ///< samples in the data set
  std::span<const int64_t> labels = {};  ///< Dataset::labels()
  int num_replicas = 1;
  int rank = 0;
  int64_t seed = 0;
  std::span<const int64_t> shard_ends = {};  ///< Dataset::shard_ends()
};

/// The registry behind `sampler: {type: distributed}`: distributed, class_skewed, weighted,
/// repeated_augmentation and shards, each with the options of its class (weighted has class_weights
/// and replacement).
/// For distributed, class_skewed and shards, make() throws base::UserError on every rank if any
/// rank would have no sample of its own.
struct SamplerKind {
  using Registry = config::Registry<std::shared_ptr<Sampler>, const SamplerArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::data

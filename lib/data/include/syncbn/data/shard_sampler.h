#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

struct ShardSamplerOptions {
  static constexpr int64_t kMostBuffer = 1'000'000'000'000;
  static constexpr int64_t kMostStreams = 1'000'000;

  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;
  /// Samples that are mixed with each other, of all ranks together.
  int64_t buffer_size = 10'000;
  /// Places that are read at by turns, of all ranks together.
  int64_t streams = 16;
};

/// The order of webdataset's loaders, for samples that lie in a few large files: shards in a random
/// order, their samples mixed in a buffer. So files are read from front to end, in large pieces.
///
/// The shards of an epoch, one behind the other, are cut into `streams` parts of equal length. Of
/// each part, buffer_size / streams samples at a time are put into a random order. The list of all
/// ranks takes a sample of each part by turns; rank r takes every num_replicas-th of the list from
/// the r-th on, and the list is padded from its front to equal shares (or cut, with drop_last).
///
/// The list is the same for any number of ranks. Where that divides `streams`, each rank has parts
/// of its own, and reads few shards besides the others'.
class ShardSampler : public Sampler {
 public:
  /// `shard_ends`: Dataset::shard_ends().
  /// @throws base::UserError for ends that do not grow, buffer_size or streams below 1 or above
  ///   what ShardSamplerOptions names, and a rank outside [0, num_replicas).
  ShardSampler(std::span<const int64_t> shard_ends, const ShardSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override;
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }
  std::string order_name() const override;
  std::vector<int64_t> storage_order(std::span<const int64_t> indices) const override;
  int64_t read_ahead() const override;

 private:
  int64_t dataset_size() const { return ends_.empty() ? 0 : ends_.back(); }
  /// The samples of all shards, in the epoch's order of the shards.
  std::vector<int64_t> shard_by_shard() const;
  void mix(std::span<int64_t> part, int64_t stream) const;
  /// All ranks' samples.
  std::vector<int64_t> list_of_all(bool mixed) const;

  std::vector<int64_t> ends_;
  ShardSamplerOptions options_;
};

}  // namespace syncbn::data

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

struct ShardSamplerOptions {
  static constexpr int64_t kMaxBufferSize = 1'000'000'000'000;
  static constexpr int64_t kMaxStreams = 1'000'000;

  std::optional<int> num_replicas = std::nullopt;  ///< defaults to process_rank(), as does `rank`
  std::optional<int> rank = std::nullopt;
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;
  /// Samples that are shuffled with each other, over all ranks.
  int64_t buffer_size = 10'000;
  /// Positions at which all ranks together read files in turn.
  int64_t streams = 16;

  static void describe(config::Schema<ShardSamplerOptions>& schema);
};

/// The order of webdataset's loaders, for samples in a few large files: shards in random order,
/// their samples shuffled in a buffer, so that each file is read sequentially in large pieces.
///
/// The concatenated shards of an epoch are cut into `streams` parts of equal length. In each part,
/// every buffer_size / streams samples in a row are shuffled with each other. The global list takes
/// one sample from each part in turn, and is padded from its front (or cut, with drop_last) to a
/// multiple of W = num_replicas. Rank r takes the elements r, r + W, r + 2W, ...
///
/// The list does not depend on the number of ranks. If that number divides `streams`, each rank
/// has its own parts and shares few shards with other ranks.
class ShardSampler : public RankedSampler<ShardSamplerOptions> {
 public:
  /// `shard_ends`: Dataset::shard_ends().
  /// @throws base::UserError for decreasing ends, buffer_size or streams outside
  ///   [1, kMaxBufferSize] and [1, kMaxStreams], and a rank outside [0, num_replicas).
  ShardSampler(std::span<const int64_t> shard_ends, const ShardSamplerOptions& options);

  std::vector<int64_t> indices() const override;
  int64_t size() const override;
  std::optional<Share> share() const override { return Share{*options_.rank, dataset_size()}; }
  std::string order_name() const override;
  std::vector<int64_t> storage_order(std::span<const int64_t> indices) const override;
  int64_t read_ahead() const override;

 private:
  int64_t dataset_size() const { return ends_.empty() ? 0 : ends_.back(); }
  void shuffle_part(std::span<int64_t> part, int64_t stream) const;
  /// The samples of all ranks. @param shuffled within buffers
  std::vector<int64_t> global_list(bool shuffled) const;

  std::vector<int64_t> ends_;
};

}  // namespace syncbn::data

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

/// Names and defaults are those of torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  std::optional<int> num_replicas = std::nullopt;  ///< defaults to process_rank(), as does `rank`
  std::optional<int> rank = std::nullopt;
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;

  static void describe(config::Schema<DistributedSamplerOptions>& schema);
};

/// Divides a data set of `size` samples evenly among `num_replicas` ranks: by default, those of the
/// job.
///
///     DistributedSampler sampler(size);  // or (size, {.num_replicas = 3, .rank = 1})
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (int64_t index : sampler.indices()) ...
///     }
///
/// The order is exactly that of torch.utils.data.DistributedSampler: a permutation drawn from
/// seed + epoch, padded from its front (or cut, with drop_last) to a multiple of W = num_replicas.
/// Rank r takes the elements r, r + W, r + 2W, ...
/// Logs a warning once if a second shuffled order is requested without a call of set_epoch().
class DistributedSampler : public RankedSampler<DistributedSamplerOptions> {
 public:
  /// @throws base::UserError for a negative size or a rank outside [0, num_replicas).
  explicit DistributedSampler(int64_t size, const DistributedSamplerOptions& options = {});

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return num_samples_; }
  std::optional<Share> share() const override { return Share{*options_.rank, dataset_size_}; }
  std::string order_name() const override;

 private:
  int64_t dataset_size_;
  int64_t num_samples_;
  mutable int shuffles_ = 0;
};

}  // namespace syncbn::data

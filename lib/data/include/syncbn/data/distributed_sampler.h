#pragma once

#include <cstdint>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

/// The same names and defaults as torch.utils.data.DistributedSampler's arguments.
struct DistributedSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;
};

/// Deals a data set of `size` samples to `num_replicas` ranks, each the same number of them.
///
///     DistributedSampler sampler(size, {.num_replicas = 3, .rank = 1});
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (int64_t index : sampler.indices()) ...
///     }
///
/// The order is exactly that of PyTorch's torch.utils.data.DistributedSampler: a permutation drawn
/// from seed + epoch, padded by repeating it from its front (or cut, with drop_last) to a multiple
/// of the number of ranks, of which rank r takes every num_replicas-th from the r-th on.
/// A shuffled order that is asked for a second time although set_epoch() was never called is warned
/// of, once: every epoch has the first one's order then.
class DistributedSampler : public Sampler {
 public:
  /// @throws base::UserError for a negative size or a rank outside [0, num_replicas).
  explicit DistributedSampler(int64_t size, const DistributedSamplerOptions& options = {});

  std::vector<int64_t> indices() const override;
  int64_t size() const override { return num_samples_; }
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }
  std::string order_name() const override;

 private:
  int64_t dataset_size_;
  DistributedSamplerOptions options_;
  int64_t num_samples_;
  mutable int orders_given_ = 0;
};

}  // namespace syncbn::data

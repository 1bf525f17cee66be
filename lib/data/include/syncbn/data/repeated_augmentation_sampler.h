#pragma once

#include <cstdint>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

/// The same names and defaults as timm's RepeatAugSampler, but for the seed.
struct RepeatedAugmentationSamplerOptions {
  int num_replicas = 1;
  int rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
  /// How often a sample comes, one after the other: so that different ranks have it at once.
  int64_t num_repeats = 3;
  /// An epoch has size / selected_ratio samples a rank; 0: the number of ranks, which keeps an
  /// epoch as long as one without repeats.
  int64_t selected_ratio = 0;
  /// `size` is first cut to a multiple of this; 0: it is not.
  int64_t selected_round = 256;
};

/// Several augmentations of one sample in one global batch (Hoffer et al., arXiv:1901.09335, as
/// used by Touvron et al., arXiv:2012.12877). With num_repeats ranks or more, each has one of them.
class RepeatedAugmentationSampler : public Sampler {
 public:
  /// @throws base::UserError when an option is below 1 (selected_ratio, selected_round: below 0),
  ///   for a rank outside [0, num_replicas), a negative size, and when an epoch would be empty.
  explicit RepeatedAugmentationSampler(int64_t size,
                                       const RepeatedAugmentationSamplerOptions& options = {});

  std::vector<int64_t> indices() const override;
  std::vector<int64_t> earlier_draws() const override;
  int64_t size() const override { return num_selected_; }
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }

 private:
  /// Where in the repeated order this rank's i-th sample stands.
  int64_t place(int64_t i) const;

  int64_t dataset_size_;
  RepeatedAugmentationSamplerOptions options_;
  int64_t num_selected_ = 0;
};

}  // namespace syncbn::data

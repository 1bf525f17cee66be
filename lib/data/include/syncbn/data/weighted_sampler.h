#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <syncbn/data/sampler.h>

namespace syncbn::data {

struct WeightedSamplerOptions {
  /// Samples of all ranks together in an epoch; 0: as many as there are weights.
  int64_t num_samples = 0;
  /// Whether a sample may come more than once in an epoch.
  bool replacement = true;
  int num_replicas = 1;
  int rank = 0;
  int64_t seed = 0;
};

/// Draws sample i with a probability in proportion to weights[i], for data whose classes are far
/// from equally frequent. Twin of torch.utils.data.WeightedRandomSampler, whose order it has for
/// one rank and a generator seeded with seed + epoch; here all ranks share the draws: rank r takes
/// every num_replicas-th from the r-th on, padded as DistributedSampler does.
class WeightedSampler : public Sampler {
 public:
  /// @throws base::UserError for no weights or more than 2^24 of them (the most that PyTorch draws
  ///   from), one that is negative or not finite, none above zero; without replacement for more
  ///   samples than weights above zero; for a negative number of samples or a rank outside
  ///   [0, num_replicas).
  explicit WeightedSampler(std::span<const double> weights,
                           const WeightedSamplerOptions& options = {});

  std::vector<int64_t> indices() const override;
  std::vector<int64_t> earlier_draws() const override;
  int64_t size() const override;
  int num_replicas() const override { return options_.num_replicas; }
  int64_t seed() const override { return options_.seed; }

 private:
  std::vector<int64_t> draw() const;

  std::vector<double> weights_;
  WeightedSamplerOptions options_;
};

/// A weight for each sample, one over the number of samples of its class: so every class is drawn
/// as often as every other.
/// @throws base::UserError for a negative label.
std::vector<double> class_balancing_weights(std::span<const int64_t> labels);

}  // namespace syncbn::data

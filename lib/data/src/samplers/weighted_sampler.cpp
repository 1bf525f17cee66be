#include <syncbn/data/sampler.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include "samplers/permutation.h"

namespace syncbn::data {
namespace {

constexpr size_t kMostWeights = size_t{1} << 24;

void check_weights(const std::vector<double>& weights, const WeightedSamplerOptions& options) {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= 0 && std::isfinite(weights[i])) continue;
    throw base::UserError(fmt::format(
        "weighted sampler: sample {} has the weight {}; weights are finite and not negative", i,
        weights[i]));
  }
  if (weights.size() > kMostWeights) {
    throw base::UserError(
        fmt::format("weighted sampler: {} weights; {} are the most", weights.size(), kMostWeights));
  }
  const auto possible = std::ranges::count_if(weights, [](double weight) { return weight > 0; });
  if (possible == 0) throw base::UserError("weighted sampler: no weight is above 0");
  if (!options.replacement && options.num_samples > possible) {
    throw base::UserError(
        fmt::format("weighted sampler: {} cannot be drawn without replacement from {} "
                    "whose weight is above 0",
                    base::counted(options.num_samples, "sample"), possible));
  }
}

}  // namespace

WeightedSampler::WeightedSampler(std::vector<double> weights, const WeightedSamplerOptions& options)
    : weights_(std::move(weights)), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (options_.num_samples == 0) options_.num_samples = std::ssize(weights_);
  if (options_.num_samples < 0) {
    throw base::UserError(
        fmt::format("weighted sampler: {} samples cannot be drawn", options_.num_samples));
  }
  check_weights(weights_, options_);
  base::Fnv1a hash;
  for (const double weight : weights_) hash.add(std::bit_cast<uint64_t>(weight));
  hash_of_weights_ = hash.value();
}

std::string WeightedSampler::order_name() const {
  return fmt::format("weighted, replacement {}, num_samples {}, weights {:016x}",
                     options_.replacement, options_.num_samples, hash_of_weights_);
}

int64_t WeightedSampler::size() const {
  return share_of(options_.num_samples, options_.num_replicas, /*drop_last=*/false);
}

std::vector<int64_t> WeightedSampler::indices() const {
  // Unsigned, so that a negative seed wraps as it does in torch.Generator.manual_seed.
  const uint64_t sum = static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(epoch());
  const at::Tensor drawn =
      at::multinomial(at::tensor(weights_, at::kDouble), options_.num_samples, options_.replacement,
                      at::detail::createCPUGenerator(sum));
  const auto* order = drawn.const_data_ptr<int64_t>();
  return deal({order, static_cast<size_t>(options_.num_samples)}, options_.num_replicas,
              options_.rank, size());
}

}  // namespace syncbn::data

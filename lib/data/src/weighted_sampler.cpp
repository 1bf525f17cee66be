#include <syncbn/data/weighted_sampler.h>

#include <ATen/ops/multinomial.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <syncbn/base/error.h>

#include "permutation.h"

namespace syncbn::data {
namespace {

constexpr int64_t kMostWeights = int64_t{1} << 24;

void check_weights(std::span<const double> weights) {
  if (weights.empty() || std::ssize(weights) > kMostWeights) {
    throw base::UserError(fmt::format("weighted sampler: it takes 1 to {} weights, got {}",
                                      kMostWeights, weights.size()));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= 0 && std::isfinite(weights[i])) continue;
    throw base::UserError(fmt::format(
        "weighted sampler: sample {} has the weight {}; weights are finite and not negative", i,
        weights[i]));
  }
}

}  // namespace

WeightedSampler::WeightedSampler(std::span<const double> weights,
                                 const WeightedSamplerOptions& options)
    : weights_(weights.begin(), weights.end()), options_(options) {
  check_rank(options.num_replicas, options.rank);
  check_weights(weights);
  if (options_.num_samples == 0) options_.num_samples = std::ssize(weights_);
  const auto possible =
      std::count_if(weights.begin(), weights.end(), [](double weight) { return weight > 0; });
  if (options_.num_samples > 0 && possible > 0 &&
      (options.replacement || options_.num_samples <= possible)) {
    return;
  }
  throw base::UserError(fmt::format(
      "weighted sampler: {} samples cannot be drawn {} replacement where {} of {} weights are "
      "above "
      "zero",
      options_.num_samples, options.replacement ? "with" : "without", possible, weights.size()));
}

int64_t WeightedSampler::size() const {
  return (options_.num_samples + options_.num_replicas - 1) / options_.num_replicas;
}

std::vector<int64_t> WeightedSampler::draw() const {
  const at::Tensor drawn = at::multinomial(at::tensor(weights_, at::kDouble), options_.num_samples,
                                           options_.replacement, epoch_generator(seed(), epoch()));
  const auto* first = drawn.const_data_ptr<int64_t>();
  return {first, first + drawn.numel()};
}

std::vector<int64_t> WeightedSampler::indices() const {
  return deal(draw(), options_.num_replicas, options_.rank);
}

std::vector<int64_t> WeightedSampler::earlier_draws() const {
  std::vector<int64_t> seen(weights_.size());
  std::vector<int64_t> earlier = draw();
  for (int64_t& one : earlier) one = seen[static_cast<size_t>(one)]++;
  return deal(earlier, options_.num_replicas, options_.rank);
}

std::vector<double> class_balancing_weights(std::span<const int64_t> labels) {
  std::unordered_map<int64_t, int64_t> counts;
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0) {
      throw base::UserError(fmt::format(
          "weighted sampler: sample {} has the label {}; labels count from 0", i, labels[i]));
    }
    ++counts[labels[i]];
  }
  std::vector<double> weights;
  weights.reserve(labels.size());
  for (const int64_t label : labels) weights.push_back(1.0 / static_cast<double>(counts[label]));
  return weights;
}

}  // namespace syncbn::data

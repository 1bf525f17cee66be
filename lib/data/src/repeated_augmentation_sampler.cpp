#include <syncbn/data/repeated_augmentation_sampler.h>

#include <fmt/format.h>

#include <numeric>

#include <syncbn/base/error.h>

#include "permutation.h"

namespace syncbn::data {
namespace {

void check_at_least(int64_t least, const char* name, int64_t value) {
  if (value >= least) return;
  throw base::UserError(fmt::format("repeated_augmentation sampler: {} must be at least {}, got {}",
                                    name, least, value));
}

}  // namespace

RepeatedAugmentationSampler::RepeatedAugmentationSampler(
    int64_t size, const RepeatedAugmentationSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
  check_at_least(1, "num_repeats", options.num_repeats);
  check_at_least(0, "selected_ratio", options.selected_ratio);
  check_at_least(0, "selected_round", options.selected_round);
  const int64_t ratio = options.selected_ratio == 0 ? options.num_replicas : options.selected_ratio;
  const int64_t round = options.selected_round;
  num_selected_ = round == 0 ? (size + ratio - 1) / ratio : size / round * round / ratio;
  if (num_selected_ > 0) return;
  throw base::UserError(fmt::format(
      "repeated_augmentation sampler: an epoch of {} samples would be empty: cut to a multiple of "
      "selected_round={} and divided by {}; set selected_round: 0 or use more data",
      size, round, ratio));
}

int64_t RepeatedAugmentationSampler::place(int64_t i) const {
  const int64_t repeated = dataset_size_ * options_.num_repeats;
  return (options_.rank + i * options_.num_replicas) % repeated;  // padding: from the front
}

std::vector<int64_t> RepeatedAugmentationSampler::indices() const {
  std::vector<int64_t> order;
  if (options_.shuffle) {
    order = permutation(dataset_size_, options_.seed, epoch());
  } else {
    order.resize(static_cast<size_t>(dataset_size_));
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(num_selected_));
  for (int64_t i = 0; i < num_selected_; ++i) {
    mine.push_back(order[static_cast<size_t>(place(i) / options_.num_repeats)]);
  }
  return mine;
}

std::vector<int64_t> RepeatedAugmentationSampler::earlier_draws() const {
  std::vector<int64_t> earlier;
  earlier.reserve(static_cast<size_t>(num_selected_));
  for (int64_t i = 0; i < num_selected_; ++i) earlier.push_back(place(i) % options_.num_repeats);
  return earlier;
}

}  // namespace syncbn::data

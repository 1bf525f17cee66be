#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <numeric>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "samplers/permutation.h"

namespace syncbn::data {

RepeatedAugmentationSampler::RepeatedAugmentationSampler(
    int64_t size, const RepeatedAugmentationSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
  if (options.repetitions < 1 || options.selected_round < 0) {
    throw base::UserError(fmt::format(
        "repeated augmentation: repetitions {} must be at least 1, selected_round {} at least 0",
        options.repetitions, options.selected_round));
  }
  const int64_t replicas = options.num_replicas;
  const int64_t round = options.selected_round;
  num_selected_ = round > 0 ? size / round * round / replicas : (size + replicas - 1) / replicas;
  if (num_selected_ == 0) {
    throw base::UserError(
        fmt::format("repeated augmentation: {}, cut to a multiple of selected_round {}, "
                    "leave none for each of {}; set selected_round to 0",
                    base::counted(size, "sample"), round, base::counted(replicas, "rank")));
  }
}

std::string RepeatedAugmentationSampler::order_name() const {
  return fmt::format("repeated_augmentation, shuffle {}, repetitions {}", options_.shuffle,
                     options_.repetitions);
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
  // The list of all ranks has each sample `repetitions` times in a row, and goes on at its front.
  const int64_t all = dataset_size_ * options_.repetitions;
  for (int64_t i = 0; i < num_selected_; ++i) {
    const int64_t place = (options_.rank + i * options_.num_replicas) % all;
    mine.push_back(order[static_cast<size_t>(place / options_.repetitions)]);
  }
  return mine;
}

int64_t RepeatedAugmentationSampler::copy_at(int64_t place) const {
  return (options_.rank + place * options_.num_replicas) % options_.repetitions;
}

}  // namespace syncbn::data

#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <syncbn/base/error.h>

#include "samplers/permutation.h"

namespace syncbn::data {

SequentialShardSampler::SequentialShardSampler(int64_t size, int num_replicas, int rank)
    : dataset_size_(size), num_replicas_(num_replicas), rank_(rank) {
  check_rank(num_replicas, rank);
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
}

std::vector<int64_t> SequentialShardSampler::indices() const {
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(size()));
  for (int64_t index = rank_; index < dataset_size_; index += num_replicas_) mine.push_back(index);
  return mine;
}

int64_t SequentialShardSampler::size() const {
  return dataset_size_ / num_replicas_ + (rank_ < dataset_size_ % num_replicas_ ? 1 : 0);
}

}  // namespace syncbn::data

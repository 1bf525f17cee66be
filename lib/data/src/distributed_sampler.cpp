#include <syncbn/data/distributed_sampler.h>

#include <fmt/format.h>

#include <numeric>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>

#include "permutation.h"

namespace syncbn::data {

DistributedSampler::DistributedSampler(int64_t size, const DistributedSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
  // With drop_last PyTorch says ceil((N - W) / W) for an uneven N, which is floor(N / W).
  const int64_t replicas = options.num_replicas;
  num_samples_ = options.drop_last ? size / replicas : size / replicas + (size % replicas != 0);
}

std::vector<int64_t> DistributedSampler::indices() const {
  std::vector<int64_t> order;
  if (options_.shuffle) {
    if (++orders_given_ == 2 && !epoch_was_set()) {
      spdlog::warn(
          "DistributedSampler: set_epoch() was never called, so this epoch has the order of the "
          "one "
          "before; call it with the epoch's number before each epoch");
    }
    order = permutation(dataset_size_, options_.seed, epoch());
  } else {
    order.resize(static_cast<size_t>(dataset_size_));
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(num_samples_));
  for (int64_t i = 0; i < num_samples_; ++i) {
    const int64_t place = options_.rank + i * options_.num_replicas;
    mine.push_back(order[static_cast<size_t>(place % dataset_size_)]);  // padding: from the front
  }
  return mine;
}

}  // namespace syncbn::data

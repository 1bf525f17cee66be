#include <syncbn/data/distributed_sampler.h>

#include <fmt/format.h>

#include <syncbn/base/log.h>

#include "samplers/order.h"

namespace syncbn::data {

DistributedSampler::DistributedSampler(int64_t size, const DistributedSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_shard(size, options.num_replicas, options.rank);
  num_samples_ = samples_per_rank(size, options.num_replicas, options.drop_last);
}

std::string DistributedSampler::order_name() const {
  return fmt::format("distributed, shuffle {}", options_.shuffle);
}

std::vector<int64_t> DistributedSampler::indices() const {
  if (options_.shuffle && ++shuffles_ == 2 && !epoch_was_set()) {
    spdlog::warn(
        "DistributedSampler: set_epoch() was never called, so this epoch has the order of the one "
        "before; call it with the epoch's number before each epoch");
  }
  return shard_of(epoch_order(dataset_size_, options_.shuffle, options_.seed, epoch()),
                  options_.num_replicas, options_.rank, num_samples_);
}

}  // namespace syncbn::data

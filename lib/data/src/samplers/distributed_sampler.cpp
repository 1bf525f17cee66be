#include <syncbn/data/distributed_sampler.h>

#include <fmt/format.h>

#include <numeric>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>

#include "samplers/permutation.h"

namespace syncbn::data {

DistributedSampler::DistributedSampler(int64_t size, const DistributedSamplerOptions& options)
    : dataset_size_(size), options_(options) {
  check_rank(options.num_replicas, options.rank);
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
  num_samples_ = share_of(size, options.num_replicas, options.drop_last);
}

std::string DistributedSampler::order_name() const {
  return fmt::format("distributed, shuffle {}", options_.shuffle);
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
  return deal(order, options_.num_replicas, options_.rank, num_samples_);
}

}  // namespace syncbn::data

#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "samplers/permutation.h"

namespace syncbn::data {
namespace {

[[noreturn]] void fail_for_empty_shard(int rank, int num_replicas,
                                       const std::set<int64_t>& labels) {
  std::vector<std::string> names;
  names.reserve(labels.size());
  for (const int64_t label : labels) names.push_back(std::to_string(label));
  throw base::UserError(fmt::format(
      "class_skewed sampler: rank {} of {} has no sample: it takes the labels y with y % {} == {}, "
      "and the labels are {}; start fewer ranks or use the distributed sampler",
      rank, num_replicas, num_replicas, rank, names.empty() ? "none" : base::join(names, ", ")));
}

}  // namespace

ClassSkewedSampler::ClassSkewedSampler(std::span<const int64_t> labels,
                                       const ClassSkewedSamplerOptions& options)
    : options_(options) {
  check_rank(options.num_replicas, options.rank);
  std::vector<int64_t> sizes(static_cast<size_t>(options.num_replicas));
  std::set<int64_t> present;
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0) {
      throw base::UserError(fmt::format(
          "class_skewed sampler: sample {} has the label {}; labels count from 0", i, labels[i]));
    }
    const int64_t owner = labels[i] % options.num_replicas;
    ++sizes[static_cast<size_t>(owner)];
    present.insert(labels[i]);
    if (owner == options.rank) shard_.push_back(static_cast<int64_t>(i));
  }
  const auto empty = std::find(sizes.begin(), sizes.end(), 0);
  if (empty != sizes.end()) {
    fail_for_empty_shard(static_cast<int>(empty - sizes.begin()), options.num_replicas, present);
  }
  padded_size_ = *std::max_element(sizes.begin(), sizes.end());
}

std::string ClassSkewedSampler::order_name() const {
  // Which samples come together depends on the number of ranks, here alone.
  return fmt::format("class_skewed, shuffle {}, {}", options_.shuffle,
                     base::counted(options_.num_replicas, "rank"));
}

std::vector<int64_t> ClassSkewedSampler::indices() const {
  std::vector<int64_t> order = shard_;
  if (options_.shuffle) {
    const auto places = permutation(static_cast<int64_t>(shard_.size()), seed(), epoch());
    for (size_t i = 0; i < places.size(); ++i) order[i] = shard_[static_cast<size_t>(places[i])];
  }
  order.reserve(static_cast<size_t>(padded_size_));
  for (size_t i = 0; std::ssize(order) < padded_size_; ++i) order.push_back(order[i]);
  return order;
}

}  // namespace syncbn::data

#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>

#include "permutation.h"

namespace syncbn::data {
namespace {

struct DistributedChoice {
  bool shuffle = true;
  bool drop_last = false;

  static void describe(config::Schema<DistributedChoice>& schema) {
    schema.field("shuffle", &DistributedChoice::shuffle, "a new order in every epoch");
    schema.field("drop_last", &DistributedChoice::drop_last,
                 "leave out the samples that do not divide evenly, instead of repeating some");
  }
};

struct WeightedChoice {
  std::vector<double> class_weights;
  bool replacement = true;

  static void describe(config::Schema<WeightedChoice>& schema) {
    schema
        .field("class_weights", &WeightedChoice::class_weights,
               "of each class's samples together; empty: all classes come equally often")
        .at_least(0);
    schema.field("replacement", &WeightedChoice::replacement,
                 "a sample can come several times in an epoch");
  }
};

struct RepeatedAugmentationChoice {
  bool shuffle = true;
  int64_t repetitions = 3;
  int64_t selected_round = 256;

  static void describe(config::Schema<RepeatedAugmentationChoice>& schema) {
    schema.field("shuffle", &RepeatedAugmentationChoice::shuffle, "a new order in every epoch");
    schema
        .field("repetitions", &RepeatedAugmentationChoice::repetitions,
               "how often a sample comes in a row")
        .at_least(1);
    schema
        .field("selected_round", &RepeatedAugmentationChoice::selected_round,
               "an epoch's length is cut to a multiple of this; 0: not")
        .at_least(0);
  }
};

struct ClassSkewedChoice {
  bool shuffle = true;

  static void describe(config::Schema<ClassSkewedChoice>& schema) {
    schema.field("shuffle", &ClassSkewedChoice::shuffle, "a new order in every epoch");
  }
};

std::shared_ptr<Sampler> make_distributed(const DistributedChoice& choice,
                                          const SamplerArgs& args) {
  // PyTorch's sampler would let ranks share samples; in a training run that is a mistake.
  if (args.size < args.num_replicas) {
    throw base::UserError(
        fmt::format("{} samples are too few for {} ranks: each rank needs one of its own; start "
                    "fewer ranks or use more data",
                    args.size, args.num_replicas));
  }
  return std::make_shared<DistributedSampler>(
      args.size, DistributedSamplerOptions{.num_replicas = args.num_replicas,
                                           .rank = args.rank,
                                           .shuffle = choice.shuffle,
                                           .seed = args.seed,
                                           .drop_last = choice.drop_last});
}

std::shared_ptr<Sampler> make_class_skewed(const ClassSkewedChoice& choice,
                                           const SamplerArgs& args) {
  if (args.labels.empty()) {
    throw base::UserError(
        "the class_skewed sampler needs a data set that knows its labels; this one does not, use "
        "the distributed sampler");
  }
  return std::make_shared<ClassSkewedSampler>(
      args.labels, ClassSkewedSamplerOptions{.num_replicas = args.num_replicas,
                                             .rank = args.rank,
                                             .shuffle = choice.shuffle,
                                             .seed = args.seed});
}

/// A sample's weight is its class's share, divided among the class's samples.
std::vector<double> sample_weights(const WeightedChoice& choice, std::span<const int64_t> labels) {
  std::map<int64_t, int64_t> counts;
  for (const int64_t label : labels) ++counts[label];
  const auto known = std::ssize(choice.class_weights);
  if (known > 0 && (counts.begin()->first < 0 || counts.rbegin()->first >= known)) {
    throw base::UserError(
        fmt::format("the weighted sampler has {} class_weights, and the labels go from {} to {}",
                    known, counts.begin()->first, counts.rbegin()->first));
  }
  std::vector<double> weights;
  weights.reserve(labels.size());
  for (const int64_t label : labels) {
    const double share = known > 0 ? choice.class_weights[static_cast<size_t>(label)] : 1.0;
    weights.push_back(share / static_cast<double>(counts[label]));
  }
  return weights;
}

std::shared_ptr<Sampler> make_weighted(const WeightedChoice& choice, const SamplerArgs& args) {
  if (args.labels.empty()) {
    throw base::UserError(
        "the weighted sampler needs a data set that knows its labels; this one does not, use the "
        "distributed sampler");
  }
  return std::make_shared<WeightedSampler>(
      sample_weights(choice, args.labels),
      WeightedSamplerOptions{.num_replicas = args.num_replicas,
                             .rank = args.rank,
                             .seed = args.seed,
                             .replacement = choice.replacement});
}

std::shared_ptr<Sampler> make_repeated_augmentation(const RepeatedAugmentationChoice& choice,
                                                    const SamplerArgs& args) {
  return std::make_shared<RepeatedAugmentationSampler>(
      args.size, RepeatedAugmentationSamplerOptions{.num_replicas = args.num_replicas,
                                                    .rank = args.rank,
                                                    .shuffle = choice.shuffle,
                                                    .seed = args.seed,
                                                    .repetitions = choice.repetitions,
                                                    .selected_round = choice.selected_round});
}

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

SamplerKind::Registry& SamplerKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<DistributedChoice>("distributed",
                                "evenly to all ranks, in the order of PyTorch's DistributedSampler",
                                make_distributed);
    made.add<WeightedChoice>("weighted", "classes by their weights, equally often by default",
                             make_weighted);
    made.add<RepeatedAugmentationChoice>("repeated_augmentation",
                                         "each sample several times, augmented differently",
                                         make_repeated_augmentation);
    made.add<ClassSkewedChoice>(
        "class_skewed", "rank r of W sees only the labels y with y % W == r", make_class_skewed);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::data

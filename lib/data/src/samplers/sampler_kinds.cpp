#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <map>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/shard_sampler.h>

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

struct ShardsChoice {
  bool shuffle = true;
  bool drop_last = false;
  int64_t buffer_size = 10'000;
  int64_t streams = 16;

  static void describe(config::Schema<ShardsChoice>& schema) {
    schema.field("shuffle", &ShardsChoice::shuffle,
                 "a new order of shards and samples in every epoch");
    schema.field("drop_last", &ShardsChoice::drop_last,
                 "leave out the samples that do not divide evenly, instead of repeating some");
    schema
        .field("buffer_size", &ShardsChoice::buffer_size,
               "samples that are mixed with each other, of all ranks together")
        .at_least(1)
        .at_most(ShardSamplerOptions::kMostBuffer);
    schema
        .field("streams", &ShardsChoice::streams,
               "places that are read at by turns; a multiple of the ranks gives each its own")
        .at_least(1)
        .at_most(ShardSamplerOptions::kMostStreams);
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

void check_enough(const SamplerArgs& args) {
  // PyTorch's sampler would let ranks share samples; in a training run that is a mistake.
  if (args.size < args.num_replicas) {
    throw base::UserError(
        fmt::format("{} too few for {} ranks: each rank needs one of its own; start "
                    "fewer ranks or use more data",
                    args.size == 1 ? "1 sample is" : fmt::format("{} samples are", args.size),
                    args.num_replicas));
  }
}

std::shared_ptr<Sampler> make_distributed(const DistributedChoice& choice,
                                          const SamplerArgs& args) {
  check_enough(args);
  return std::make_shared<DistributedSampler>(
      args.size, DistributedSamplerOptions{.num_replicas = args.num_replicas,
                                           .rank = args.rank,
                                           .shuffle = choice.shuffle,
                                           .seed = args.seed,
                                           .drop_last = choice.drop_last});
}

std::shared_ptr<Sampler> make_shards(const ShardsChoice& choice, const SamplerArgs& args) {
  if (args.shard_ends.empty()) {
    throw base::UserError(
        "the shards sampler needs a data set that lies in shards, such as tar_shards; this one "
        "does "
        "not, use the distributed sampler");
  }
  check_enough(args);
  return std::make_shared<ShardSampler>(args.shard_ends,
                                        ShardSamplerOptions{.num_replicas = args.num_replicas,
                                                            .rank = args.rank,
                                                            .shuffle = choice.shuffle,
                                                            .seed = args.seed,
                                                            .drop_last = choice.drop_last,
                                                            .buffer_size = choice.buffer_size,
                                                            .streams = choice.streams});
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
    throw base::UserError(fmt::format(
        "the weighted sampler has {}, and the labels go from {} to {}",
        base::counted(known, "class_weight"), counts.begin()->first, counts.rbegin()->first));
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

}  // namespace

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
    made.add<ShardsChoice>("shards", "shards in a random order, their samples mixed in a buffer",
                           make_shards);
    made.add<ClassSkewedChoice>(
        "class_skewed", "rank r of W sees only the labels y with y % W == r", make_class_skewed);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::data

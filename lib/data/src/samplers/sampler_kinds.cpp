#include <syncbn/data/sampler.h>

#include <fmt/format.h>

#include <map>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/shard_sampler.h>

namespace syncbn::data {
namespace {

constexpr const char* kShuffleHelp = "a new order in every epoch";
constexpr const char* kDropLastHelp =
    "leave out the samples that do not divide evenly, instead of repeating some";

/// A WeightedSampler's configuration, with weights of classes instead of samples.
struct WeightedChoice {
  std::vector<double> class_weights;
  bool replacement = true;

  static void describe(config::Schema<WeightedChoice>& schema) {
    schema
        .field(
            "class_weights", &WeightedChoice::class_weights,
            "one for each class, shared by its samples; empty: all classes are drawn equally often")
        .at_least(0);
    schema.field("replacement", &WeightedChoice::replacement,
                 "a sample can be drawn several times in an epoch");
  }
};

/// The options from the configuration, completed for this rank.
template <class Options>
Options for_rank(Options options, const SamplerArgs& args) {
  options.num_replicas = args.num_replicas;
  options.rank = args.rank;
  options.seed = args.seed;
  return options;
}

// PyTorch's sampler would let ranks share samples, which is a mistake in a training run.
void check_enough(const SamplerArgs& args) {
  if (args.size >= args.num_replicas) return;
  throw base::UserError(
      fmt::format("{} too few for {}: each rank needs one of its own; start fewer ranks or use "
                  "more data",
                  args.size == 1 ? "1 sample is" : fmt::format("{} samples are", args.size),
                  base::counted(args.num_replicas, "rank")));
}

void check_labels(const char* kind, const SamplerArgs& args) {
  if (!args.labels.empty()) return;
  throw base::UserError(
      fmt::format("the {} sampler needs a data set that knows its labels; this one does not, use "
                  "the distributed sampler",
                  kind));
}

std::shared_ptr<Sampler> make_distributed(const DistributedSamplerOptions& options,
                                          const SamplerArgs& args) {
  check_enough(args);
  return std::make_shared<DistributedSampler>(args.size, for_rank(options, args));
}

std::shared_ptr<Sampler> make_shards(const ShardSamplerOptions& options, const SamplerArgs& args) {
  if (args.shard_ends.empty()) {
    throw base::UserError(
        "the shards sampler needs a data set that lies in shards, such as tar_shards; this one "
        "does not, use the distributed sampler");
  }
  check_enough(args);
  return std::make_shared<ShardSampler>(args.shard_ends, for_rank(options, args));
}

std::shared_ptr<Sampler> make_class_skewed(const ClassSkewedSamplerOptions& options,
                                           const SamplerArgs& args) {
  check_labels("class_skewed", args);
  return std::make_shared<ClassSkewedSampler>(args.labels, for_rank(options, args));
}

/// A class's weight is divided among its samples.
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
    const double weight = known > 0 ? choice.class_weights[static_cast<size_t>(label)] : 1.0;
    weights.push_back(weight / static_cast<double>(counts[label]));
  }
  return weights;
}

std::shared_ptr<Sampler> make_weighted(const WeightedChoice& choice, const SamplerArgs& args) {
  check_labels("weighted", args);
  return std::make_shared<WeightedSampler>(
      sample_weights(choice, args.labels),
      for_rank(WeightedSamplerOptions{.replacement = choice.replacement}, args));
}

std::shared_ptr<Sampler> make_repeated_augmentation(
    const RepeatedAugmentationSamplerOptions& options, const SamplerArgs& args) {
  return std::make_shared<RepeatedAugmentationSampler>(args.size, for_rank(options, args));
}

}  // namespace

void DistributedSamplerOptions::describe(config::Schema<DistributedSamplerOptions>& schema) {
  schema.field("shuffle", &DistributedSamplerOptions::shuffle, kShuffleHelp);
  schema.field("drop_last", &DistributedSamplerOptions::drop_last, kDropLastHelp);
}

void ShardSamplerOptions::describe(config::Schema<ShardSamplerOptions>& schema) {
  schema.field("shuffle", &ShardSamplerOptions::shuffle,
               "a new order of shards and samples in every epoch");
  schema.field("drop_last", &ShardSamplerOptions::drop_last, kDropLastHelp);
  schema
      .field("buffer_size", &ShardSamplerOptions::buffer_size,
             "samples that are shuffled with each other, of all ranks together")
      .between(1, kMaxBufferSize);
  schema
      .field("streams", &ShardSamplerOptions::streams,
             "positions at which shards are read in turn; a multiple of the number of ranks gives "
             "each rank its own")
      .between(1, kMaxStreams);
}

void RepeatedAugmentationSamplerOptions::describe(
    config::Schema<RepeatedAugmentationSamplerOptions>& schema) {
  using Options = RepeatedAugmentationSamplerOptions;
  schema.field("shuffle", &Options::shuffle, kShuffleHelp);
  schema.field("repetitions", &Options::repetitions, "how often each sample is given").at_least(1);
  schema
      .field("selected_round", &Options::selected_round,
             "an epoch's length is rounded down to a multiple of this; 0: it is not")
      .at_least(0);
}

void ClassSkewedSamplerOptions::describe(config::Schema<ClassSkewedSamplerOptions>& schema) {
  schema.field("shuffle", &ClassSkewedSamplerOptions::shuffle, kShuffleHelp);
}

SamplerKind::Registry& SamplerKind::registry() {
  static Registry registry = [] {
    Registry made("sampler");
    made.add<DistributedSamplerOptions>(
        "distributed", "evenly to all ranks, in the order of PyTorch's DistributedSampler",
        make_distributed);
    made.add<WeightedChoice>("weighted", "classes by their weights, equally often by default",
                             make_weighted);
    made.add<RepeatedAugmentationSamplerOptions>("repeated_augmentation",
                                                 "each sample several times, augmented differently",
                                                 make_repeated_augmentation);
    made.add<ShardSamplerOptions>(
        "shards", "shards in a random order, their samples shuffled in a buffer", make_shards);
    made.add<ClassSkewedSamplerOptions>(
        "class_skewed", "rank r of W sees only the labels y with y % W == r", make_class_skewed);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::data

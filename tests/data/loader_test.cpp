#include <syncbn/data/loader.h>

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <syncbn/base/error.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/sampler.h>
#include <syncbn/data/shard_sampler.h>

namespace syncbn::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr int64_t kSamples = 21;

/// The value of sample i is i.
class Counting : public Dataset {
 public:
  explicit Counting(int64_t size, uint64_t fingerprint = 1)
      : size_(size), fingerprint_(fingerprint) {}
  int64_t size() const override { return size_; }
  Batch get_batch(std::span<const int64_t> indices) const override {
    const std::vector<int64_t> numbers(indices.begin(), indices.end());
    return {at::tensor(numbers, at::kFloat), at::tensor(numbers, at::kLong)};
  }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return size_; }
  std::vector<int64_t> sample_shape() const override { return {}; }
  uint64_t fingerprint() const override { return fingerprint_; }

 private:
  int64_t size_;
  uint64_t fingerprint_;
};

struct LoaderCase {
  int64_t samples = 10;
  int64_t batch_size = 4;
  bool drop_last = false;
  int ranks = 1;
  int rank = 0;
  bool shuffle = false;
  int64_t seed = 0;
  uint64_t fingerprint = 1;
};

Loader make(const LoaderCase& setup) {
  return Loader(std::make_shared<Counting>(setup.samples, setup.fingerprint),
                std::make_shared<DistributedSampler>(
                    setup.samples, DistributedSamplerOptions{.num_replicas = setup.ranks,
                                                             .rank = setup.rank,
                                                             .shuffle = setup.shuffle,
                                                             .seed = setup.seed}),
                {.batch_size = setup.batch_size, .drop_last = setup.drop_last});
}

std::vector<int64_t> numbers(const Batch& batch) {
  const auto* first = batch.target.const_data_ptr<int64_t>();
  return {first, first + batch.size()};
}

std::vector<std::vector<int64_t>> rest(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  while (const auto batch = loader.next()) batches.push_back(numbers(*batch));
  return batches;
}

TEST(LoaderTest, KeepsASmallerLastBatch) {
  Loader loader = make({});
  loader.start_epoch(0);
  EXPECT_EQ(loader.num_batches(), 3);
  EXPECT_THAT(rest(loader),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7), ElementsAre(8, 9)));
}

TEST(LoaderTest, DropLastLeavesOutASmallerLastBatch) {
  Loader loader = make({.drop_last = true});
  loader.start_epoch(0);
  EXPECT_EQ(loader.num_batches(), 2);
  EXPECT_THAT(rest(loader), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
}

TEST(LoaderTest, ReturnsNothingBeforeTheFirstEpoch) {
  Loader loader = make({});
  EXPECT_FALSE(loader.next().has_value());
}

TEST(LoaderTest, ReturnsNothingForAnEmptyDataSet) {
  Loader loader = make({.samples = 0});
  loader.start_epoch(0);
  EXPECT_EQ(loader.num_batches(), 0);
  EXPECT_THAT(rest(loader), IsEmpty());
}

TEST(LoaderTest, SetsTheSamplersEpoch) {
  Loader loader = make({.samples = 100, .shuffle = true});
  loader.start_epoch(0);
  const auto first = rest(loader);
  loader.start_epoch(1);
  EXPECT_NE(rest(loader), first);
  loader.start_epoch(0);
  EXPECT_EQ(rest(loader), first);
}

TEST(LoaderTest, StartsOverAfterAnUnfinishedEpoch) {
  Loader loader = make({});
  loader.start_epoch(0);
  loader.next();
  loader.start_epoch(1);
  EXPECT_THAT(rest(loader),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7), ElementsAre(8, 9)));
}

TEST(LoaderTest, ResumesAtEveryPositionOfAnEpoch) {
  const LoaderCase setup{.samples = 23, .ranks = 2, .rank = 1, .shuffle = true, .seed = 9};
  Loader reference = make(setup);
  for (int64_t taken = 0; taken <= reference.num_batches(); ++taken) {
    reference.start_epoch(5);
    for (int64_t i = 0; i < taken; ++i) reference.next();
    const SamplerState state = reference.state();
    Loader resumed = make(setup);
    resumed.resume(state);
    EXPECT_EQ(resumed.state().consumed, state.consumed);
    EXPECT_EQ(rest(resumed), rest(reference)) << taken << " batches";
  }
}

/// Takes `steps` batches on each of `ranks` ranks, starting at `state`, and counts the samples.
SamplerState take(int ranks, int64_t batch_size, int64_t steps, const SamplerState& state,
                  std::map<int64_t, int>& seen) {
  SamplerState end;
  std::set<int64_t> left;
  for (int rank = 0; rank < ranks; ++rank) {
    Loader loader = make({.samples = 25,
                          .batch_size = batch_size,
                          .ranks = ranks,
                          .rank = rank,
                          .shuffle = true,
                          .seed = 7});
    loader.resume(state);
    for (int64_t step = 0; step < steps; ++step) {
      const auto batch = loader.next();
      if (!batch) break;
      for (const int64_t number : numbers(*batch)) ++seen[number];
    }
    if (rank > 0) {
      EXPECT_EQ(loader.state().consumed, end.consumed);
    }
    end = loader.state();
    left.insert(loader.batches_left());
  }
  EXPECT_EQ(left.size(), 1U) << "ranks with other numbers of steps wait for each other";
  return end;
}

TEST(LoaderTest, ResumesOnAnyNumberOfRanksWithEachSampleOnce) {
  constexpr int64_t kAll = 1000;
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>{
           {2, 4}, {2, 3}, {3, 2}, {3, 1}, {1, 3}, {1, 2, 3}, {3, 2, 1}, {2, 3, 2, 3}, {1, 4, 3}}) {
    for (const int64_t batch_size : {1, 2, 3}) {
      std::map<int64_t, int> seen;
      SamplerState state = make({.samples = 25, .shuffle = true, .seed = 7}).state();
      state.epoch = 3;
      for (size_t i = 0; i + 1 < ranks.size(); ++i) {
        state = take(ranks[i], batch_size, /*steps=*/1, state, seen);
      }
      take(ranks.back(), batch_size, kAll, state, seen);
      const std::string what =
          fmt::format("{} ranks, batches of {}", fmt::join(ranks, ", "), batch_size);
      EXPECT_EQ(seen.size(), 25U) << what;
      int more = 0;
      for (const auto& [number, times] : seen) more += times - 1;
      EXPECT_LT(more, ranks.back()) << "samples that even out the last step; " << what;
    }
  }
}

constexpr int64_t kListed = 25;

struct ResumingSampler {
  const char* name;
  std::function<std::shared_ptr<Sampler>(int ranks, int rank)> make;
  bool drops_last = false;
};

std::vector<ResumingSampler> samplers_that_resume() {
  const auto distributed = [](bool drop_last) {
    return [=](int ranks, int rank) -> std::shared_ptr<Sampler> {
      return std::make_shared<DistributedSampler>(
          kListed, DistributedSamplerOptions{
                       .num_replicas = ranks, .rank = rank, .seed = 7, .drop_last = drop_last});
    };
  };
  const auto shards = [](bool drop_last) {
    return [=](int ranks, int rank) -> std::shared_ptr<Sampler> {
      const std::vector<int64_t> ends = {9, 20, kListed};
      return std::make_shared<ShardSampler>(ends, ShardSamplerOptions{.num_replicas = ranks,
                                                                      .rank = rank,
                                                                      .seed = 7,
                                                                      .drop_last = drop_last,
                                                                      .buffer_size = 6,
                                                                      .streams = 3});
    };
  };
  const auto weighted = [](int ranks, int rank) -> std::shared_ptr<Sampler> {
    std::vector<double> weights(kListed, 1);
    weights[3] = 10;
    return std::make_shared<WeightedSampler>(
        weights, WeightedSamplerOptions{.num_replicas = ranks, .rank = rank, .seed = 7});
  };
  const auto repeated = [](int ranks, int rank) -> std::shared_ptr<Sampler> {
    return std::make_shared<RepeatedAugmentationSampler>(
        kListed, RepeatedAugmentationSamplerOptions{
                     .num_replicas = ranks, .rank = rank, .seed = 7, .selected_round = 0});
  };
  return {{"distributed", distributed(false)},
          {"distributed, drop_last", distributed(true), true},
          {"shards", shards(false)},
          {"shards, drop_last", shards(true), true},
          {"weighted", weighted},
          {"repeated augmentation", repeated}};
}

/// Takes batches on all ranks, and returns how often each sample was in one.
std::map<int64_t, int> taken_by(const ResumingSampler& sampler, bool drop_last, int ranks,
                                int64_t steps, SamplerState& state) {
  constexpr int64_t kBatch = 2;
  std::map<int64_t, int> seen;
  SamplerState end;
  std::set<int64_t> batches;
  for (int rank = 0; rank < ranks; ++rank) {
    Loader loader(std::make_shared<Counting>(kListed), sampler.make(ranks, rank),
                  {.batch_size = kBatch, .drop_last = drop_last});
    loader.resume(state);
    int64_t step = 0;
    for (; step < steps; ++step) {
      const auto batch = loader.next();
      if (!batch) break;
      if (drop_last) {
        EXPECT_EQ(batch->size(), kBatch);
      }
      for (const int64_t number : numbers(*batch)) ++seen[number];
    }
    batches.insert(step);
    end = loader.state();
  }
  EXPECT_EQ(batches.size(), 1U) << "ranks with other numbers of steps wait for each other";
  state = end;
  return seen;
}

TEST(LoaderTest, ResumesOnAnyNumberOfRanksInTheOrderOfEverySampler) {
  for (const ResumingSampler& sampler : samplers_that_resume()) {
    for (const bool drop_last : {false, true}) {
      for (const int before : {1, 2, 3}) {
        for (const int after : {1, 2, 3, 4}) {
          SCOPED_TRACE(fmt::format("{}, drop_last of the loader {}, {} to {} ranks", sampler.name,
                                   drop_last, before, after));
          std::map<int64_t, int> expected;
          const auto alone = sampler.make(1, 0);
          alone->set_epoch(3);
          for (const int64_t index : alone->indices()) ++expected[index];
          SamplerState state{.seed = 7, .epoch = 3, .fingerprint = 1, .order = alone->order_name()};
          auto seen = taken_by(sampler, drop_last, before, /*steps=*/1, state);
          for (const auto& [index, times] : taken_by(sampler, drop_last, after, 1000, state)) {
            seen[index] += times;
          }
          int missing = 0;
          int more = 0;
          for (int64_t index = 0; index < kListed; ++index) {
            missing += std::max(0, expected[index] - seen[index]);
            more += std::max(0, seen[index] - expected[index]);
          }
          if (drop_last || sampler.drops_last) {
            EXPECT_LT(missing, 2 * after + before) << "what is left of a step";
          } else {
            EXPECT_EQ(missing, 0);
          }
          EXPECT_LT(more, before + 2 * after) << "samples that even out a step and the epoch";
        }
      }
    }
  }
}

TEST(LoaderTest, AnEpochsEndIsItsEndForAnyNumberOfRanks) {
  std::map<int64_t, int> seen;
  const SamplerState begin = make({.samples = 25, .shuffle = true, .seed = 7}).state();
  const SamplerState end = take(3, 2, 1000, begin, seen);
  EXPECT_EQ(end.consumed, 27) << "two samples twice";
  for (const int ranks : {1, 2, 4}) {
    seen.clear();
    take(ranks, 2, 1000, end, seen);
    EXPECT_THAT(seen, IsEmpty()) << ranks;
  }
}

TEST(LoaderTest, RefusesAStateOfAnotherSeedDataSetOrFormat) {
  Loader loader = make({});
  loader.start_epoch(0);
  const SamplerState state = loader.state();
  EXPECT_THAT([&] { make({.seed = 4}).resume(state); },
              ThrowsMessage<base::UserError>(HasSubstr("seed 0, this run has seed 4")));
  EXPECT_THAT(
      [&] { make({.fingerprint = 2}).resume(state); },
      ThrowsMessage<base::UserError>(HasSubstr("the training data is not what it was saved with")));
  SamplerState later = state;
  later.version = 3;
  EXPECT_THAT(
      [&] { make({}).resume(later); },
      ThrowsMessage<base::UserError>(HasSubstr("in format 3, this program reads formats 1 to 2")));
}

/// Reads one batch in one order, and resumes in another order.
void go_on(const std::shared_ptr<Sampler>& before, const std::shared_ptr<Sampler>& after) {
  const auto dataset = std::make_shared<Counting>(kSamples);
  Loader first(dataset, before, {.batch_size = 2});
  first.start_epoch(0);
  first.next();
  Loader(dataset, after, {.batch_size = 2}).resume(first.state());
}

template <class Made, class Of, class Options>
void expect_another_order(const Of& of, const Options& before, const Options& after,
                          const std::string& name) {
  const auto sampler = [&](const Options& options) { return std::make_shared<Made>(of, options); };
  EXPECT_NO_THROW(go_on(sampler(before), sampler(before)));
  EXPECT_THAT(
      [&] { go_on(sampler(before), sampler(after)); },
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("in the middle of an epoch"),
                                           HasSubstr(fmt::format("this run's is '{}'", name)))));
}

TEST(LoaderTest, RefusesToResumeAnEpochInAnotherOrder) {
  using Repeated = RepeatedAugmentationSamplerOptions;
  const std::vector<int64_t> ends = {10, kSamples};
  const std::vector<int64_t> labels = {0, 1, 1, 0};
  const std::vector<double> weights(kSamples, 1.0);
  expect_another_order<DistributedSampler>(kSamples, DistributedSamplerOptions{},
                                           DistributedSamplerOptions{.shuffle = false},
                                           "distributed, shuffle false");
  expect_another_order<ShardSampler>(ends, ShardSamplerOptions{},
                                     ShardSamplerOptions{.buffer_size = 500},
                                     "shards, shuffle true, buffer_size 500, streams 16");
  expect_another_order<ShardSampler>(ends, ShardSamplerOptions{}, ShardSamplerOptions{.streams = 4},
                                     "shards, shuffle true, buffer_size 10000, streams 4");
  expect_another_order<ShardSampler>(ends, ShardSamplerOptions{},
                                     ShardSamplerOptions{.shuffle = false},
                                     "shards, shuffle false, buffer_size 10000, streams 16");
  expect_another_order<RepeatedAugmentationSampler>(
      kSamples, Repeated{.selected_round = 0}, Repeated{.repetitions = 2, .selected_round = 0},
      "repeated_augmentation, shuffle true, repetitions 2");
  expect_another_order<ClassSkewedSampler>(labels, ClassSkewedSamplerOptions{},
                                           ClassSkewedSamplerOptions{.num_replicas = 2},
                                           "class_skewed, shuffle true, 2 ranks");
  expect_another_order<WeightedSampler>(
      weights, WeightedSamplerOptions{}, WeightedSamplerOptions{.replacement = false},
      WeightedSampler(weights, {.replacement = false}).order_name());
}

TEST(LoaderTest, RefusesToResumeAnEpochWithAnotherSamplerOrOtherWeights) {
  const auto weighted = [](double last) {
    std::vector<double> weights(kSamples, 1.0);
    weights.back() = last;
    return std::make_shared<WeightedSampler>(weights, WeightedSamplerOptions{});
  };
  EXPECT_NO_THROW(go_on(weighted(1), weighted(1)));
  EXPECT_THROW(go_on(weighted(1), weighted(2)), base::UserError);
  EXPECT_THROW(go_on(weighted(1), std::make_shared<DistributedSampler>(kSamples)), base::UserError);
}

TEST(LoaderTest, BeginsANewEpochInAnotherOrder) {
  Loader loader = make({.shuffle = true});
  loader.start_epoch(3);
  Loader other = make({.shuffle = false});
  other.resume(loader.state());
  EXPECT_THAT(numbers(*other.next()), ElementsAre(0, 1, 2, 3));
}

TEST(LoaderTest, ResumesFromAStateWithoutAnOrder) {
  Loader reference = make({.shuffle = true});
  reference.start_epoch(1);
  reference.next();
  SamplerState state = reference.state();
  state.version = 1;
  state.order = "";
  Loader resumed = make({.shuffle = true});
  resumed.resume(state);
  EXPECT_EQ(rest(resumed), rest(reference));
}

TEST(LoaderTest, ResumesWithAnotherDropLast) {
  const auto sampler = [](bool drop_last) {
    return std::make_shared<DistributedSampler>(
        kSamples, DistributedSamplerOptions{.num_replicas = 2, .drop_last = drop_last});
  };
  EXPECT_NO_THROW(go_on(sampler(false), sampler(true)));
}

TEST(LoaderTest, RefusesAPositionThatTheseRanksCannotReach) {
  Loader loader = make({.ranks = 2});
  SamplerState state = loader.state();
  state.consumed = -2;
  EXPECT_THROW(loader.resume(state), base::UserError);
  // The ranks of this sampler do not divide one list.
  Loader separate(std::make_shared<Counting>(10),
                  std::make_shared<SequentialShardSampler>(10, 2, 0), {.batch_size = 2});
  state = separate.state();
  state.consumed = 3;
  EXPECT_THAT([&] { separate.resume(state); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("3 samples of the epoch were consumed, not a multiple of 2 ranks")));
}

TEST(LoaderTest, RefusesABatchSizeBelowOne) {
  EXPECT_THROW(make({.batch_size = 0}), base::UserError);
}

}  // namespace
}  // namespace syncbn::data

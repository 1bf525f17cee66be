#include <syncbn/data/shard_sampler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/config/value.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/sample_dataset.h>

namespace syncbn::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

/// 40 shards of 10 to 49 samples.
std::vector<int64_t> forty_shards() {
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < 40; ++i) ends.push_back((ends.empty() ? 0 : ends.back()) + 10 + i);
  return ends;
}

const std::vector<int64_t> kEnds = forty_shards();
const int64_t kShardedSamples = kEnds.back();

std::vector<int64_t> sorted(std::vector<int64_t> numbers) {
  std::ranges::sort(numbers);
  return numbers;
}

std::vector<int64_t> all_samples() {
  std::vector<int64_t> numbers(static_cast<size_t>(kShardedSamples));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<int64_t> order_of(ShardSamplerOptions options, int64_t epoch = 0) {
  ShardSampler sampler(kEnds, options);
  sampler.set_epoch(epoch);
  EXPECT_EQ(sampler.size(), std::ssize(sampler.indices()));
  return sampler.indices();
}

/// The global list, interleaved from the orders of the ranks.
std::vector<int64_t> list_of_all(int num_replicas, ShardSamplerOptions options = {}) {
  std::vector<std::vector<int64_t>> ranks;
  options.num_replicas = num_replicas;
  for (int rank = 0; rank < num_replicas; ++rank) {
    options.rank = rank;
    ranks.push_back(order_of(options));
  }
  std::vector<int64_t> list;
  for (size_t i = 0; i < ranks[0].size(); ++i) {
    for (const auto& rank : ranks) list.push_back(rank.at(i));
  }
  return list;
}

TEST(ShardSamplerTest, ReturnsEachSampleOnceForAnyBufferAndNumberOfStreams) {
  for (const int64_t buffer : {int64_t{1}, int64_t{7}, int64_t{100}, 2 * kShardedSamples}) {
    for (const int64_t streams : {int64_t{1}, int64_t{3}, int64_t{16}, 2 * kShardedSamples}) {
      EXPECT_EQ(sorted(order_of({.buffer_size = buffer, .streams = streams})), all_samples())
          << buffer << " " << streams;
    }
  }
}

TEST(ShardSamplerTest, ListIsTheSameForAnyNumberOfRanks) {
  const auto alone = list_of_all(1);
  for (const int ranks : {2, 3, 8, 16, 100}) {
    auto list = list_of_all(ranks);
    EXPECT_EQ(std::ssize(list), (kShardedSamples + ranks - 1) / ranks * ranks);
    // The padding repeats the list's front.
    for (size_t i = alone.size(); i < list.size(); ++i) EXPECT_EQ(list[i], alone[i - alone.size()]);
    list.resize(alone.size());
    EXPECT_EQ(list, alone) << ranks << " ranks";
    const auto cut = list_of_all(ranks, {.drop_last = true});
    EXPECT_EQ(std::ssize(cut), kShardedSamples / ranks * ranks);
    EXPECT_TRUE(std::equal(cut.begin(), cut.end(), alone.begin()));
  }
}

TEST(ShardSamplerTest, OrderIsAFunctionOfSeedAndEpoch) {
  const auto first = order_of({.seed = 1});
  EXPECT_EQ(order_of({.seed = 1}), first);
  EXPECT_NE(order_of({.seed = 2}), first);
  EXPECT_NE(order_of({.seed = 1}, 1), first);
}

TEST(ShardSamplerTest, OrderMatchesThatOfSavedRuns) {
  ShardSampler sampler(std::vector<int64_t>{3, 5, 9}, {.seed = 3, .buffer_size = 6, .streams = 2});
  sampler.set_epoch(1);
  EXPECT_THAT(sampler.storage_order(sampler.indices()), ElementsAre(3, 5, 4, 6, 0, 7, 1, 8, 2));
  EXPECT_THAT(sampler.indices(), ElementsAre(3, 5, 0, 7, 4, 6, 1, 8, 2));
}

TEST(ShardSamplerTest, WithoutShuffleStreamsAreReadInTurn) {
  const std::vector<int64_t> ends = {3, 5, 7};
  ShardSampler sampler(ends, {.shuffle = false, .streams = 3});
  EXPECT_THAT(sampler.indices(), ElementsAre(0, 3, 5, 1, 4, 6, 2));
  EXPECT_EQ(sampler.storage_order(sampler.indices()), sampler.indices());
}

TEST(ShardSamplerTest, EachRankReadsShardsOfItsOwn) {
  for (int rank = 0; rank < 4; ++rank) {
    std::set<int64_t> shards;
    for (const int64_t sample : order_of({.num_replicas = 4, .rank = rank, .streams = 4})) {
      shards.insert(std::ranges::upper_bound(kEnds, sample) - kEnds.begin());
    }
    // The rank has a quarter of the samples, and begins and ends within a shard.
    EXPECT_LT(shards.size(), 20U);
  }
}

TEST(ShardSamplerTest, ShufflesWithinABufferThatStorageIsAskedForInAdvance) {
  // 3 and 32 do not divide the 16 streams.
  for (const int ranks : {1, 3, 4, 32}) {
    for (const int rank : {0, ranks / 2, ranks - 1}) {
      ShardSampler sampler(kEnds, {.num_replicas = ranks, .rank = rank, .buffer_size = 160});
      const auto order = sampler.indices();
      const auto stored = sampler.storage_order(order);
      EXPECT_EQ(sorted(order), sorted(stored)) << "rank " << rank << " of " << ranks;
      int64_t farthest = 0;
      for (int64_t place = 0; place < std::ssize(order); ++place) {
        // A padding sample is twice in this rank's list, and its copy at the end stays there.
        const bool pads = rank + place * ranks >= kShardedSamples;
        const int64_t at =
            pads ? std::ssize(stored) - 1
                 : std::ranges::find(stored, order[static_cast<size_t>(place)]) - stored.begin();
        EXPECT_EQ(stored.at(static_cast<size_t>(at)), order[static_cast<size_t>(place)]);
        farthest = std::max(farthest, std::abs(at - place));
      }
      EXPECT_LE(farthest, 160 / ranks);
      EXPECT_GT(farthest, 160 / ranks / 2);
      EXPECT_GT(sampler.read_ahead(), 160 / ranks);
    }
  }
}

TEST(ShardSamplerTest, StorageOrderIsThatOfTheUnshuffledList) {
  const ShardSampler all(kEnds, {});
  const auto list = all.storage_order(all.indices());
  for (const int ranks : {3, 32}) {
    const ShardSampler share(kEnds, {.num_replicas = ranks, .rank = 1, .drop_last = true});
    const auto stored = share.storage_order(share.indices());
    std::vector<int64_t> places;
    places.reserve(stored.size());
    for (const int64_t sample : stored) {
      places.push_back(std::ranges::find(list, sample) - list.begin());
    }
    EXPECT_TRUE(std::ranges::is_sorted(places)) << ranks << " ranks";
  }
}

TEST(ShardSamplerTest, AcceptsTheLargestBufferAndTheMostStreams) {
  const ShardSampler sampler(kEnds, {.buffer_size = ShardSamplerOptions::kMaxBufferSize,
                                     .streams = ShardSamplerOptions::kMaxStreams});
  EXPECT_EQ(sorted(sampler.indices()), all_samples());
  EXPECT_GT(sampler.read_ahead(), ShardSamplerOptions::kMaxBufferSize);
}

TEST(ShardSamplerTest, RefusesConfigurationsOutOfBounds) {
  for (const auto& [key, number] :
       {std::pair("buffer_size", "1000000000001"), std::pair("streams", "1000001")}) {
    config::Value value = config::Value::of_map();
    value.set("type", config::Value::of_scalar("shards"));
    value.set(key, config::Value::of_scalar(number));
    config::Component<SamplerKind> made;
    config::Faults faults;
    config::Codec<config::Component<SamplerKind>>::read(value, made, "sampler", faults);
    EXPECT_THAT([&] { faults.throw_if_any(); },
                ThrowsMessage<base::UserError>(HasSubstr("at most 1000000")))
        << key;
  }
}

TEST(ShardSamplerTest, AnEmptySetHasAnEmptyOrder) {
  EXPECT_THAT(ShardSampler({}, {.num_replicas = 2}).indices(), IsEmpty());
}

TEST(ShardSamplerTest, RefusesInvalidOptions) {
  const auto refuses = [](const std::vector<int64_t>& ends, ShardSamplerOptions options,
                          const char* why) {
    EXPECT_THAT(([&] { ShardSampler(ends, options); }),
                ThrowsMessage<base::UserError>(HasSubstr(why)));
  };
  refuses({5}, {.buffer_size = 0}, "buffer_size must be from 1");
  refuses({5}, {.buffer_size = INT64_MAX},
          "buffer_size must be from 1 to 1000000000000, got 92233");
  refuses({5}, {.streams = 0}, "streams must be from 1 to 1000000, got 0");
  refuses({5}, {.streams = 1'000'001}, "streams");
  refuses({5, 4}, {}, "ends before");
  refuses({5}, {.num_replicas = 2, .rank = 2}, "rank 2 of 2");
}

TEST(ShardSamplerTest, IsMadeFromAConfigurationIfTheDataHasShards) {
  const config::Component<SamplerKind> kind("shards");
  SamplerArgs args{.size = 9, .num_replicas = 3, .rank = 1, .seed = 4};
  EXPECT_THAT([&] { kind.make(args); }, ThrowsMessage<base::UserError>(HasSubstr("tar_shards")));
  const std::vector<int64_t> ends = {4, 9};
  args.shard_ends = ends;
  EXPECT_EQ(kind.make(args)->indices(),
            ShardSampler(ends, {.num_replicas = 3, .rank = 1, .seed = 4}).indices());
  args.num_replicas = 10;
  EXPECT_THAT([&] { kind.make(args); }, ThrowsMessage<base::UserError>(HasSubstr("10 ranks")));
}

/// Records for which samples storage was asked, and which samples were read before it was.
class NotingSet : public SampleDataset {
 public:
  int64_t size() const override { return kShardedSamples; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return 1; }
  std::vector<int64_t> sample_shape() const override { return {1}; }
  uint64_t fingerprint() const override { return 1; }
  void prefetch(std::span<const int64_t> indices) const override {
    asked_for.insert(asked_for.end(), indices.begin(), indices.end());
  }
  void read_sample(int64_t index, SampleRandom&, const SampleSlot& slot) const override {
    slot.data[0] = 0;
    slot.target[0] = 0;
    const bool early = std::ranges::find(asked_for, index) == asked_for.end();
    unasked.push_back(early ? read : -1);
    ++read;
  }

  mutable std::vector<int64_t> asked_for;
  mutable std::vector<int64_t>
      unasked;  ///< positions of samples that were read before storage was asked, or -1
  mutable int64_t read = 0;
};

TEST(ShardSamplerTest, ALoaderAsksStorageForEachSampleOnceAndInAdvance) {
  const auto set = std::make_shared<NotingSet>();
  const auto sampler =
      std::make_shared<ShardSampler>(kEnds, ShardSamplerOptions{.buffer_size = 160});
  Loader loader(set, sampler, {.batch_size = 8});
  loader.start_epoch(0);
  EXPECT_THAT(set->asked_for, IsEmpty());
  while (loader.next()) {
  }
  EXPECT_EQ(set->asked_for, sampler->storage_order(sampler->indices()));
  // Each batch asks for the samples of four batches, so storage is soon a whole buffer ahead.
  EXPECT_LT(std::ranges::max(set->unasked), 160);
}

class CountingSampler : public ShardSampler {
 public:
  using ShardSampler::ShardSampler;
  std::vector<int64_t> indices() const override {
    ++calls;
    return ShardSampler::indices();
  }

  mutable int calls = 0;
};

TEST(ShardSamplerTest, ALoaderComputesAnEpochsOrderOnce) {
  const auto sampler = std::make_shared<CountingSampler>(kEnds, ShardSamplerOptions{});
  Loader loader(std::make_shared<NotingSet>(), sampler, {.batch_size = 8});
  loader.start_epoch(0);
  loader.start_epoch(1);
  EXPECT_EQ(sampler->calls, 2);
}

TEST(ShardSamplerTest, ALoaderWithLargeBatchesAsksInAdvance) {
  const auto set = std::make_shared<NotingSet>();
  const auto sampler = std::make_shared<ShardSampler>(
      kEnds, ShardSamplerOptions{.num_replicas = 4, .rank = 1, .buffer_size = 160});
  constexpr int64_t kBatch = 32;
  ASSERT_GT(4 * kBatch, sampler->read_ahead());
  Loader loader(set, sampler, {.batch_size = kBatch});
  loader.start_epoch(0);
  while (loader.next()) {
    EXPECT_LE(std::ssize(set->asked_for), set->read + sampler->read_ahead() + 4 * kBatch);
  }
  EXPECT_EQ(set->asked_for, sampler->storage_order(sampler->indices()));
  EXPECT_EQ(std::ranges::max(set->unasked), -1) << "read before storage was asked for it";
}

TEST(ShardSamplerTest, AResumedLoaderDoesNotAskForSamplesReadBefore) {
  const auto set = std::make_shared<NotingSet>();
  const auto sampler =
      std::make_shared<ShardSampler>(kEnds, ShardSamplerOptions{.buffer_size = 160});
  Loader loader(set, sampler, {.batch_size = 8});
  loader.resume({.epoch = 0, .consumed = 800, .fingerprint = 1});
  loader.next();
  const auto stored = sampler->storage_order(sampler->indices());
  EXPECT_EQ(set->asked_for, std::vector<int64_t>(stored.begin() + 800, stored.begin() + 832));
}

}  // namespace
}  // namespace syncbn::data

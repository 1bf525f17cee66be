#include <syncbn/data/sampler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include <syncbn/base/error.h>

namespace syncbn::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

using Component = config::Component<SamplerKind>;

TEST(SequentialShardSamplerTest, GivesEverySampleOnceAndRanksDifferByOne) {
  EXPECT_THAT(SequentialShardSampler(7, 3, 0).indices(), ElementsAre(0, 3, 6));
  EXPECT_THAT(SequentialShardSampler(7, 3, 1).indices(), ElementsAre(1, 4));
  EXPECT_THAT(SequentialShardSampler(7, 3, 2).indices(), ElementsAre(2, 5));
}

TEST(SequentialShardSamplerTest, CoversAnyDataSetExactly) {
  for (int64_t size = 0; size < 20; ++size) {
    for (int world = 1; world < 8; ++world) {
      std::multiset<int64_t> seen;
      for (int rank = 0; rank < world; ++rank) {
        const SequentialShardSampler sampler(size, world, rank);
        const auto indices = sampler.indices();
        EXPECT_EQ(sampler.size(), std::ssize(indices));
        seen.insert(indices.begin(), indices.end());
      }
      std::multiset<int64_t> all;
      for (int64_t i = 0; i < size; ++i) all.insert(i);
      EXPECT_EQ(seen, all) << size << " samples, " << world << " ranks";
    }
  }
}

TEST(SequentialShardSamplerTest, LeavesRanksEmptyWhenThereAreFewerSamples) {
  EXPECT_THAT(SequentialShardSampler(1, 3, 0).indices(), ElementsAre(0));
  EXPECT_THAT(SequentialShardSampler(1, 3, 2).indices(), IsEmpty());
}

TEST(SequentialShardSamplerTest, RefusesARankOutsideTheWorld) {
  EXPECT_THROW(SequentialShardSampler(1, 3, 3), base::UserError);
  EXPECT_THROW(SequentialShardSampler(-1, 3, 0), base::UserError);
}

const std::vector<int64_t> kLabels = {0, 1, 2, 3, 4, 2, 0, 4, 2, 1};

TEST(ClassSkewedSamplerTest, GivesARankOnlyItsLabels) {
  // Labels 0, 2, 4 are rank 0's.
  const ClassSkewedSampler sampler(kLabels, {.num_replicas = 2, .rank = 0, .shuffle = false});
  EXPECT_THAT(sampler.indices(), ElementsAre(0, 2, 4, 5, 6, 7, 8));
}

TEST(ClassSkewedSamplerTest, PadsToTheLongestShardFromTheFront) {
  const ClassSkewedSampler sampler(kLabels, {.num_replicas = 2, .rank = 1, .shuffle = false});
  EXPECT_THAT(sampler.indices(), ElementsAre(1, 3, 9, 1, 3, 9, 1));
  EXPECT_EQ(sampler.size(), 7);
}

TEST(ClassSkewedSamplerTest, PadsFromTheFrontOfTheShuffledShard) {
  ClassSkewedSampler sampler(kLabels, {.num_replicas = 2, .rank = 1, .seed = 5});
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    sampler.set_epoch(epoch);
    const auto order = sampler.indices();
    ASSERT_EQ(order.size(), 7U);
    EXPECT_THAT(std::vector(order.begin(), order.begin() + 3), UnorderedElementsAre(1, 3, 9));
    for (size_t i = 3; i < order.size(); ++i) EXPECT_EQ(order[i], order[i - 3]);
  }
}

TEST(ClassSkewedSamplerTest, OrderIsAFunctionOfSeedAndEpoch) {
  std::vector<int64_t> labels(100, 0);
  const auto order = [&labels](int64_t seed, int64_t epoch) {
    ClassSkewedSampler sampler(labels, {.seed = seed});
    sampler.set_epoch(epoch);
    return sampler.indices();
  };
  EXPECT_EQ(order(1, 2), order(1, 2));
  EXPECT_NE(order(1, 2), order(1, 3));
  EXPECT_NE(order(1, 2), order(2, 2));
}

TEST(ClassSkewedSamplerTest, NamesTheRankThatIsLeftWithoutALabelOnEveryRank) {
  for (int rank = 0; rank < 6; ++rank) {
    EXPECT_THAT(([&] { ClassSkewedSampler(kLabels, {.num_replicas = 6, .rank = rank}); }),
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr("rank 5 of 6"), HasSubstr("labels are 0, 1, 2, 3, 4"))));
  }
}

TEST(ClassSkewedSamplerTest, RefusesAnEmptyDataSet) {
  EXPECT_THAT([] { ClassSkewedSampler({}, {}); },
              ThrowsMessage<base::UserError>(HasSubstr("labels are none")));
}

TEST(ClassSkewedSamplerTest, RefusesNegativeLabels) {
  const std::vector<int64_t> labels = {0, -1};
  EXPECT_THAT([&] { ClassSkewedSampler(labels, {}); },
              ThrowsMessage<base::UserError>(HasSubstr("sample 1 has the label -1")));
}

TEST(ClassSkewedSamplerTest, RefusesARankOutsideTheWorld) {
  EXPECT_THROW(ClassSkewedSampler(kLabels, {.num_replicas = 2, .rank = 2}), base::UserError);
}

TEST(SamplerRegistryTest, MakesWhatTheConfigurationNames) {
  const SamplerArgs args{.size = 10, .labels = kLabels, .num_replicas = 2, .rank = 1, .seed = 3};
  for (const char* type : {"distributed", "class_skewed"}) {
    const auto sampler = Component(type).make(args);
    EXPECT_EQ(sampler->num_replicas(), 2);
    EXPECT_EQ(sampler->seed(), 3);
    EXPECT_EQ(sampler->size(), std::ssize(sampler->indices()));
  }
}

TEST(SamplerRegistryTest, RefusesMoreRanksThanSamples) {
  EXPECT_THAT([] { Component("distributed").make(SamplerArgs{.size = 3, .num_replicas = 4}); },
              ThrowsMessage<base::UserError>(HasSubstr("3 samples are too few for 4 ranks")));
}

TEST(SamplerRegistryTest, RefusesToSkewADataSetWithoutLabels) {
  EXPECT_THAT([] { Component("class_skewed").make(SamplerArgs{.size = 3}); },
              ThrowsMessage<base::UserError>(HasSubstr("knows its labels")));
}

}  // namespace
}  // namespace syncbn::data

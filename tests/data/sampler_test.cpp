#include <syncbn/data/sampler.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

using Component = config::Component<SamplerKind>;

TEST(SequentialShardSamplerTest, ReturnsEverySampleOnceAndRanksDifferByOne) {
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

TEST(ClassSkewedSamplerTest, GivesEachRankOnlyItsLabels) {
  // Rank 0 has the labels 0, 2 and 4.
  const ClassSkewedSampler sampler(kLabels, {.num_replicas = 2, .rank = 0, .shuffle = false});
  EXPECT_THAT(sampler.indices(), ElementsAre(0, 2, 4, 5, 6, 7, 8));
}

TEST(ClassSkewedSamplerTest, PadsToTheLongestShardFromTheFront) {
  const ClassSkewedSampler sampler(kLabels, {.num_replicas = 2, .rank = 1, .shuffle = false});
  EXPECT_THAT(sampler.indices(), ElementsAre(1, 3, 9, 1, 3, 9, 1));
  EXPECT_EQ(sampler.size(), 7);
  std::vector<int64_t> copies;
  for (int64_t place = 0; place < 7; ++place) copies.push_back(sampler.copy_at(place));
  EXPECT_THAT(copies, ElementsAre(0, 0, 0, 1, 1, 1, 2));
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

TEST(ClassSkewedSamplerTest, EveryRankNamesTheRankWithoutASample) {
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

TEST(WeightedSamplerTest, DrawsInProportionToTheWeights) {
  std::vector<int64_t> counts(4);
  WeightedSampler sampler({1, 0, 2, 5}, {.seed = 3, .num_samples = 16'000});
  for (const int64_t index : sampler.indices()) ++counts[static_cast<size_t>(index)];
  EXPECT_NEAR(counts[0], 2000, 200);
  EXPECT_EQ(counts[1], 0);
  EXPECT_NEAR(counts[2], 4000, 300);
  EXPECT_NEAR(counts[3], 10'000, 300);
}

TEST(WeightedSamplerTest, RanksShareOneDrawPaddedFromItsFront) {
  const std::vector<double> weights(10, 1.0);
  WeightedSampler all(weights, {.seed = 1, .replacement = false});
  all.set_epoch(2);
  const auto order = all.indices();
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 10U);
  for (int rank = 0; rank < 3; ++rank) {
    WeightedSampler sampler(weights,
                            {.num_replicas = 3, .rank = rank, .seed = 1, .replacement = false});
    sampler.set_epoch(2);
    const auto shard = sampler.indices();
    ASSERT_EQ(shard.size(), 4U);
    EXPECT_EQ(sampler.size(), 4);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(shard[i], order[(static_cast<size_t>(rank) + 3 * i) % 10]);
    }
  }
}

TEST(WeightedSamplerTest, NumbersTheDrawsOfASample) {
  std::set<std::pair<int64_t, int64_t>> draws;
  for (int rank = 0; rank < 2; ++rank) {
    const WeightedSampler sampler({1, 3},
                                  {.num_replicas = 2, .rank = rank, .seed = 4, .num_samples = 12});
    const auto shard = sampler.indices();
    for (size_t i = 0; i < shard.size(); ++i) {
      draws.emplace(shard[i], sampler.copy_at(static_cast<int64_t>(i)));
    }
  }
  EXPECT_EQ(draws.size(), 12U);
  for (const auto& [sample, copy] : draws) {
    // The copies of a sample are numbered from 0.
    EXPECT_TRUE(copy == 0 || draws.contains({sample, copy - 1}));
  }
}

TEST(WeightedSamplerTest, DrawsTheSameListAsPython) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto result = test::run_program(
      {test::python(), "-c",
       "import torch\n"
       "from torch.utils.data import WeightedRandomSampler\n"
       "for replacement in (True, False):\n"
       "    g = torch.Generator()\n"
       "    g.manual_seed(7 + 2)\n"
       "    print(*WeightedRandomSampler([0.5, 3, 0.1, 1, 1], 5, replacement, g))\n"});
  std::string ours;
  for (const bool replacement : {true, false}) {
    WeightedSampler sampler({0.5, 3, 0.1, 1, 1}, {.seed = 7, .replacement = replacement});
    sampler.set_epoch(2);
    ours += fmt::format("{}\n", fmt::join(sampler.indices(), " "));
  }
  EXPECT_EQ(ours, result.out);
}

TEST(WeightedSamplerTest, RefusesInvalidWeights) {
  const auto refuses = [](std::vector<double> weights, WeightedSamplerOptions options,
                          const char* why) {
    EXPECT_THAT(([&] { WeightedSampler(weights, options); }),
                ThrowsMessage<base::UserError>(HasSubstr(why)));
  };
  refuses({1, -1}, {}, "sample 1 has the weight -1");
  refuses({1, std::nan("")}, {}, "sample 1");
  refuses({0, 0}, {}, "no weight is above 0");
  refuses({}, {}, "no weight is above 0");
  refuses({1, 0}, {.num_samples = 2, .replacement = false}, "without replacement");
  refuses({1, 1}, {.num_samples = -1}, "-1 samples");
  refuses({1, 1}, {.num_replicas = 2, .rank = 2}, "rank 2 of 2");
}

TEST(RepeatedAugmentationSamplerTest, DividesRepetitionsAmongTheRanks) {
  const auto make = [](int rank, int64_t selected_round = 0) {
    return RepeatedAugmentationSampler(6, {.num_replicas = 2,
                                           .rank = rank,
                                           .shuffle = false,
                                           .repetitions = 3,
                                           .selected_round = selected_round});
  };
  EXPECT_THAT(make(0).indices(), ElementsAre(0, 0, 1));
  EXPECT_THAT(make(1).indices(), ElementsAre(0, 1, 1));
  // 0 0 0 1 1 1: the copies of a sample are numbered 0, 1, 2.
  EXPECT_EQ(make(0).copy_at(0), 0);
  EXPECT_EQ(make(1).copy_at(0), 1);
  EXPECT_EQ(make(0).copy_at(1), 2);
  EXPECT_THAT(make(0, 4).indices(), ElementsAre(0, 0));
}

TEST(RepeatedAugmentationSamplerTest, ShufflesAgainInEachEpoch) {
  RepeatedAugmentationSampler sampler(512, {.seed = 1});
  EXPECT_EQ(sampler.size(), 512);
  const auto first = sampler.indices();
  EXPECT_EQ(first[0], first[2]);
  sampler.set_epoch(1);
  EXPECT_NE(sampler.indices(), first);
}

TEST(RepeatedAugmentationSamplerTest, RefusesOptionsThatLeaveARankWithoutASample) {
  EXPECT_THAT([] { RepeatedAugmentationSampler(255, {}); },
              ThrowsMessage<base::UserError>(HasSubstr("set selected_round to 0")));
  EXPECT_THROW(RepeatedAugmentationSampler(300, {.repetitions = 0}), base::UserError);
  EXPECT_THROW(RepeatedAugmentationSampler(-1, {}), base::UserError);
}

TEST(SamplerRegistryTest, WeightsClassesEquallyByDefault) {
  // Label 0 occurs once, label 1 nine times.
  std::vector<int64_t> labels(10, 1);
  labels[0] = 0;
  const auto sampler = Component("weighted").make(SamplerArgs{.size = 10, .labels = labels});
  int64_t rare = 0;
  for (int64_t epoch = 0; epoch < 400; ++epoch) {
    sampler->set_epoch(epoch);
    const auto indices = sampler->indices();
    rare += std::count(indices.begin(), indices.end(), 0);
  }
  EXPECT_NEAR(static_cast<double>(rare), 2000, 150);
  EXPECT_THAT([] { Component("weighted").make(SamplerArgs{.size = 3}); },
              ThrowsMessage<base::UserError>(HasSubstr("knows its labels")));
}

TEST(SamplerRegistryTest, MakesTheSamplerThatTheConfigurationNames) {
  const SamplerArgs args{.size = 10, .labels = kLabels, .num_replicas = 2, .rank = 1, .seed = 3};
  for (const char* type : {"distributed", "class_skewed", "weighted"}) {
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

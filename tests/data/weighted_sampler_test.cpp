#include <syncbn/data/weighted_sampler.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::data {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;
using ::testing::Ne;
using ::testing::ThrowsMessage;

const std::vector<double> kWeights = {0.5, 0, 2, 1, 0.25, 4};

std::vector<int64_t> order(const WeightedSamplerOptions& options, int64_t epoch = 0) {
  WeightedSampler sampler(kWeights, options);
  sampler.set_epoch(epoch);
  return sampler.indices();
}

TEST(WeightedSamplerTest, DrawsAsPythonsWeightedRandomSampler) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto python = test::run_program({test::python(), "-c", R"(
import torch
from torch.utils.data import WeightedRandomSampler
weights = [0.5, 0, 2, 1, 0.25, 4]
for seed, number, replacement in [(0, 6, True), (3, 50, True), (4, 5, False)]:
    generator = torch.Generator().manual_seed(seed)
    print(*WeightedRandomSampler(weights, number, replacement, generator))
)"});
  ASSERT_EQ(python.exit_code, 0) << python.err;
  std::istringstream lines(python.out);
  const auto next = [&lines] {
    std::string line;
    std::getline(lines, line);
    return line;
  };
  const auto text = [](const std::vector<int64_t>& indices) {
    return fmt::format("{}", fmt::join(indices, " "));
  };
  EXPECT_EQ(text(order({})), next());
  EXPECT_EQ(text(order({.num_samples = 50, .seed = 1}, 2)), next()) << "seed and epoch are added";
  EXPECT_EQ(text(order({.num_samples = 5, .replacement = false}, 4)), next());
}

TEST(WeightedSamplerTest, RanksShareTheDrawsAndArePaddedFromTheFront) {
  const auto all = order({.num_samples = 8});
  EXPECT_THAT(order({.num_samples = 8, .num_replicas = 3, .rank = 0}),
              ElementsAre(all[0], all[3], all[6]));
  EXPECT_THAT(order({.num_samples = 8, .num_replicas = 3, .rank = 2}),
              ElementsAre(all[2], all[5], all[0]));
  EXPECT_EQ(WeightedSampler(kWeights, {.num_samples = 8, .num_replicas = 3}).size(), 3);
}

TEST(WeightedSamplerTest, DrawsInProportionAndNeverWhatHasNoWeight) {
  std::map<int64_t, int> counts;
  const auto drawn = order({.num_samples = 31000});
  for (const int64_t index : drawn) ++counts[index];
  EXPECT_THAT(drawn, Each(Ne(1)));
  for (const int64_t index : {0, 2, 3, 4, 5}) {
    // Of 7.75 in all; four standard deviations of a binomial are below 400.
    EXPECT_NEAR(counts[index], 4000 * kWeights[static_cast<size_t>(index)], 400) << index;
  }
}

TEST(WeightedSamplerTest, TellsDrawsOfOneSampleApartOnAllRanks) {
  std::map<int64_t, std::vector<int64_t>> draws;
  for (int rank = 0; rank < 2; ++rank) {
    const WeightedSampler sampler(kWeights, {.num_samples = 40, .num_replicas = 2, .rank = rank});
    const auto indices = sampler.indices();
    const auto earlier = sampler.earlier_draws();
    ASSERT_EQ(earlier.size(), indices.size());
    for (size_t i = 0; i < indices.size(); ++i) draws[indices[i]].push_back(earlier[i]);
  }
  for (auto& [index, numbers] : draws) {
    std::sort(numbers.begin(), numbers.end());
    for (size_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(numbers[i], static_cast<int64_t>(i));
  }
}

TEST(WeightedSamplerTest, RefusesWeightsThatCannotBeDrawnFrom) {
  const auto message = [](const std::vector<double>& weights,
                          const WeightedSamplerOptions& options) {
    return [weights, options] { WeightedSampler(weights, options); };
  };
  const auto says = [](const char* text) {
    return ThrowsMessage<base::UserError>(HasSubstr(text));
  };
  EXPECT_THAT(message({}, {}), says("1 to 16777216 weights, got 0"));
  EXPECT_THAT(message({1, -0.5}, {}), says("sample 1 has the weight -0.5"));
  EXPECT_THAT(message({std::numeric_limits<double>::quiet_NaN()}, {}), says("the weight nan"));
  EXPECT_THAT(message({0, 0}, {}), says("0 of 2 weights are above zero"));
  EXPECT_THAT(message({1, 0, 1}, {.replacement = false}),
              says("3 samples cannot be drawn without replacement where 2 of 3"));
  EXPECT_THAT(message({1}, {.num_samples = -1}), says("-1 samples"));
  EXPECT_THAT(message({1}, {.num_replicas = 2, .rank = 2}), says("rank 2 of 2"));
}

TEST(WeightedSamplerTest, BalancesClasses) {
  const std::vector<int64_t> labels = {0, 0, 0, 0, 7, 7, 2, 0};
  EXPECT_THAT(class_balancing_weights(labels), ElementsAre(0.2, 0.2, 0.2, 0.2, 0.5, 0.5, 1, 0.2));
  EXPECT_THAT(([] {
                class_balancing_weights(std::vector<int64_t>{0, -3});
              }),
              ThrowsMessage<base::UserError>(HasSubstr("sample 1 has the label -3")));
}

}  // namespace
}  // namespace syncbn::data

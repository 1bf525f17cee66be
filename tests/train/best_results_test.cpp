#include "checkpoints/best_results.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>

namespace syncbn::train {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;

std::vector<std::string> files(const std::vector<Checkpoint::Best>& best) {
  std::vector<std::string> names;
  for (const auto& one : best) names.push_back(one.file);
  return names;
}

TEST(BestResultsTest, KeepsTheBestOnly) {
  std::vector<Checkpoint::Best> best;
  const auto add = [&](double value, int64_t epoch) {
    return add_result(best, {.value = value, .epoch = epoch, .step = 10 * epoch}, 1,
                      /*higher_is_better=*/true);
  };
  EXPECT_THAT(add(0.5, 1).write, Optional(std::string("best.pt")));
  EXPECT_EQ(add(0.4, 2).write, std::nullopt);
  EXPECT_EQ(add(0.5, 3).write, std::nullopt) << "the earlier one of two equals stays";
  const BestChange change = add(0.6, 4);
  EXPECT_TRUE(change.is_best);
  EXPECT_EQ(change.aside, std::nullopt);
  EXPECT_EQ(change.remove, std::nullopt);
  ASSERT_EQ(best.size(), 1U);
  EXPECT_EQ(best[0].epoch, 4);
  EXPECT_EQ(add(std::numeric_limits<double>::quiet_NaN(), 5).write, std::nullopt);
}

TEST(BestResultsTest, OfEqualValuesTheLowerLossIsBetter) {
  std::vector<Checkpoint::Best> best;
  const auto add = [&](double value, std::optional<double> loss, int64_t epoch) {
    return add_result(best, {.value = value, .loss = loss, .epoch = epoch, .step = epoch}, 1,
                      /*higher_is_better=*/true);
  };
  add(1, 0.5, 1);
  EXPECT_TRUE(add(1, 0.25, 2).is_best);
  EXPECT_FALSE(add(1, 0.25, 3).is_best) << "the earlier one of two equals stays";
  EXPECT_FALSE(add(1, 0.375, 4).is_best);
  EXPECT_FALSE(add(1, std::numeric_limits<double>::quiet_NaN(), 5).is_best);
  EXPECT_FALSE(add(0.875, 0.125, 6).is_best) << "the value comes first";
  ASSERT_EQ(best.size(), 1U);
  EXPECT_EQ(best[0].epoch, 2);
}

TEST(BestResultsTest, OfEqualValuesAMissingLossDecidesNothingAndNanIsTheHighest) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const auto is_better = [](std::optional<double> loss, std::optional<double> former) {
    std::vector<Checkpoint::Best> best = {
        {.value = 1, .loss = former, .epoch = 1, .step = 1, .file = "best.pt"}};
    return add_result(best, {.value = 1, .loss = loss, .epoch = 2, .step = 2}, 1, true).is_best;
  };
  EXPECT_FALSE(is_better(0.0, std::nullopt));
  EXPECT_FALSE(is_better(std::nullopt, 0.0));
  EXPECT_FALSE(is_better(std::nullopt, std::nullopt));
  EXPECT_FALSE(is_better(std::nullopt, kNan));
  EXPECT_TRUE(is_better(9.0, kNan));
  EXPECT_FALSE(is_better(kNan, 9.0));
  EXPECT_FALSE(is_better(kNan, kNan));
}

TEST(BestResultsTest, ABetterValueCountsWhateverItsLoss) {
  std::vector<Checkpoint::Best> best = {{.value = 1, .epoch = 1, .step = 1, .file = "best.pt"}};
  EXPECT_TRUE(add_result(best, {.value = 2, .loss = 9.0, .epoch = 3, .step = 3}, 1, true).is_best);
}

TEST(BestResultsTest, TheLossIsThatOfTheSameNetwork) {
  EXPECT_EQ(loss_beside("accuracy"), "loss");
  EXPECT_EQ(loss_beside("ema_accuracy"), "ema_loss");
  EXPECT_EQ(loss_beside("loss"), "loss");
}

TEST(BestResultsTest, KeepsAFewInTheirOrder) {
  std::vector<Checkpoint::Best> best;
  const auto add = [&](double value, int64_t epoch) {
    return add_result(best, {.value = value, .epoch = epoch, .step = 10 * epoch}, 3,
                      /*higher_is_better=*/false);
  };
  add(5, 1);
  EXPECT_THAT(add(7, 2).write, Optional(std::string("best-000000000020.pt")));
  BestChange change = add(4, 3);
  EXPECT_THAT(change.aside, Optional(std::string("best-000000000010.pt")));
  EXPECT_THAT(change.write, Optional(std::string("best.pt")));
  EXPECT_THAT(files(best), ElementsAre("best.pt", "best-000000000010.pt", "best-000000000020.pt"));
  change = add(6, 4);
  EXPECT_THAT(change.write, Optional(std::string("best-000000000040.pt")));
  EXPECT_THAT(change.remove, Optional(std::string("best-000000000020.pt")));
  EXPECT_THAT(files(best), ElementsAre("best.pt", "best-000000000010.pt", "best-000000000040.pt"));
  EXPECT_EQ(add(8, 5).write, std::nullopt);
}

TEST(BestResultsTest, RemembersTheBestOfNone) {
  std::vector<Checkpoint::Best> best;
  EXPECT_EQ(add_result(best, {.value = 0.5}, 0, true).write, std::nullopt);
  EXPECT_EQ(add_result(best, {.value = 0.7}, 0, true).write, std::nullopt);
  ASSERT_EQ(best.size(), 1U);
  EXPECT_EQ(best[0].value, 0.7);
}

TEST(BestResultsTest, SmallStepsAddUpToAnImprovement) {
  EXPECT_TRUE(improves(0.5, std::nullopt, /*higher_is_better=*/true, 0.1));
  EXPECT_FALSE(improves(0.56, 0.5, true, 0.1));
  EXPECT_TRUE(improves(0.61, 0.5, true, 0.1)) << "compared with the last improvement";
  EXPECT_TRUE(improves(0.3, 0.5, /*higher_is_better=*/false, 0.1));
  EXPECT_FALSE(improves(0.45, 0.5, false, 0.1));
  EXPECT_FALSE(improves(std::numeric_limits<double>::quiet_NaN(), std::nullopt, true, 0));
}

}  // namespace
}  // namespace syncbn::train

#include <syncbn/data/subset.h>

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>

#include "data/noise.h"

namespace syncbn::data {
namespace {

using ::testing::ElementsAre;

TEST(SubsetTest, HasTheSamplesOfItsIndices) {
  const auto all =
      make_synthetic({.size = 20, .height = 4, .width = 4, .classes = 3}, Split::kTrain);
  const auto some = subset(all, {4, 7, 2});
  EXPECT_EQ(some->size(), 3);
  EXPECT_EQ(some->num_classes(), 3);
  EXPECT_THAT(std::vector(some->labels().begin(), some->labels().end()), ElementsAre(1, 1, 2));
  const std::vector<int64_t> first = {0, 2};
  const std::vector<int64_t> same = {4, 2};
  EXPECT_TRUE(at::equal(some->get_batch(first).data, all->get_batch(same).data));
  EXPECT_NE(some->fingerprint(), all->fingerprint());
  EXPECT_NE(some->fingerprint(), subset(all, {4, 2, 7})->fingerprint());
  EXPECT_EQ(some->fingerprint(), subset(all, {4, 7, 2})->fingerprint());
  EXPECT_THROW(some->get_batch(same), base::InternalError);
  EXPECT_THROW(subset(all, {20}), base::InternalError);
}

TEST(SubsetTest, OfSamplesMakesThemOneAtATime) {
  const auto all = std::make_shared<const test::Noise>(8, [](int64_t) {});
  const auto some = subset(all, {5, 1});
  const auto* const samples = dynamic_cast<const SampleDataset*>(some.get());
  ASSERT_NE(samples, nullptr) << "the loader's threads make them";
  EXPECT_EQ(samples->name_of(0), all->name_of(5));
}

TEST(HoldOutTest, TakesTheSameShareOfEachClass) {
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < 60; ++i) labels.push_back(i % 6 == 0 ? 1 : 0);
  const HeldOut parts = hold_out(60, labels, 0.2);
  EXPECT_EQ(parts.train.size() + parts.held_out.size(), 60U);
  int64_t rare = 0;
  for (const int64_t index : parts.held_out) rare += labels[static_cast<size_t>(index)];
  EXPECT_EQ(rare, 2);
  EXPECT_EQ(parts.held_out.size(), 12U);
  EXPECT_THAT(hold_out(10, {}, 0.3).held_out, ElementsAre(3, 6, 9));
}

}  // namespace
}  // namespace syncbn::data

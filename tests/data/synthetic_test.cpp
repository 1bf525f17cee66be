#include <syncbn/data/synthetic.h>

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include <syncbn/base/error.h>

namespace syncbn::data {
namespace {

constexpr SyntheticOptions kSmall{
    .size = 60, .test_size = 7, .channels = 2, .height = 9, .width = 5, .classes = 3};

TEST(SyntheticTest, HasTheRequestedSizesAndShapes) {
  const auto train = make_synthetic(kSmall, Split::kTrain);
  EXPECT_EQ(train->size(), 60);
  EXPECT_EQ(make_synthetic(kSmall, Split::kTest)->size(), 7);
  EXPECT_EQ(train->num_classes(), 3);
  EXPECT_THAT(train->sample_shape(), ::testing::ElementsAre(2, 9, 5));
  const Batch batch = train->get_batch(std::vector<int64_t>{0, 59});
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{2, 2, 9, 5}));
}

TEST(SyntheticTest, PixelsDoNotDependOnTheOrderOfRequests) {
  const auto train = make_synthetic(kSmall, Split::kTrain);
  const Batch forwards = train->get_batch(std::vector<int64_t>{3, 4});
  const Batch backwards =
      make_synthetic(kSmall, Split::kTrain)->get_batch(std::vector<int64_t>{4, 3});
  EXPECT_TRUE(forwards.data[0].equal(backwards.data[1]));
  EXPECT_TRUE(forwards.data[1].equal(backwards.data[0]));
  EXPECT_FALSE(forwards.data[0].equal(forwards.data[1]));
}

TEST(SyntheticTest, DiffersBetweenSplitsAndSeeds) {
  const std::vector<int64_t> first = {0};
  const auto train = make_synthetic(kSmall, Split::kTrain);
  SyntheticOptions other = kSmall;
  other.seed = 1;
  for (const auto& dataset :
       {make_synthetic(kSmall, Split::kTest), make_synthetic(other, Split::kTrain)}) {
    EXPECT_FALSE(dataset->get_batch(first).data.equal(train->get_batch(first).data));
    EXPECT_NE(dataset->fingerprint(), train->fingerprint());
  }
}

TEST(SyntheticTest, NearestClassMeanSeparatesTheClasses) {
  SyntheticOptions options = kSmall;
  options.size = 300;
  const auto train = make_synthetic(options, Split::kTrain);
  std::vector<int64_t> indices(300);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i);
  const Batch batch = train->get_batch(indices);
  const at::Tensor flat = batch.data.flatten(1);
  std::vector<at::Tensor> means;
  for (int64_t label = 0; label < 3; ++label)
    means.push_back(flat.index({batch.target.eq(label)}).mean(0));
  const at::Tensor nearest = at::cdist(flat, at::stack(means)).argmin(1);
  EXPECT_GT(nearest.eq(batch.target).to(at::kFloat).mean().item<float>(), 0.95F);
  EXPECT_NEAR(flat.var().item<float>(), 1.25F, 0.05F);  // noise 1, signal 0.5^2
}

TEST(SyntheticTest, RefusesAnIndexOutsideTheDataSet) {
  EXPECT_THROW(make_synthetic(kSmall, Split::kTest)->get_batch(std::vector<int64_t>{7}),
               base::InternalError);
}

}  // namespace
}  // namespace syncbn::data

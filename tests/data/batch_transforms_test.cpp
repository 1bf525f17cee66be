#include <syncbn/data/batch_transforms.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <syncbn/base/error.h>

namespace syncbn::data {
namespace {

Batch batch_of(int64_t size) {
  return {at::arange(size * 3 * 8 * 10, at::kFloat).view({size, 3, 8, 10}),
          at::arange(size, at::kLong)};
}

TEST(NormalizeTest, MatchesTorchvision) {
  const at::Tensor images =
      at::arange(2 * 3 * 4 * 5, at::kLong).remainder(256).to(at::kByte).view({2, 3, 4, 5});
  const Normalization imagenet = Normalization::imagenet();
  const at::Tensor result = normalize(images, imagenet);
  EXPECT_EQ(result.scalar_type(), at::kFloat);
  for (int64_t c = 0; c < 3; ++c) {
    const auto at = static_cast<size_t>(c);
    const at::Tensor expected =
        (images.select(1, c).to(at::kDouble) / 255 - imagenet.mean[at]) / imagenet.std[at];
    EXPECT_TRUE(result.select(1, c).to(at::kDouble).allclose(expected, 1e-5, 1e-5));
  }
}

TEST(NormalizeTest, KeepsChannelsLast) {
  const at::Tensor images =
      at::zeros({2, 3, 4, 5}, at::kByte).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(
      normalize(images, Normalization::imagenet()).is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(NormalizeTest, RefusesAnotherNumberOfChannels) {
  EXPECT_THROW(normalize(at::zeros({2, 1, 4, 5}, at::kByte), Normalization::imagenet()),
               base::InternalError);
}

TEST(MixupTest, MixesEachImageAndLabelWithThePreviousOne) {
  const Batch batch = batch_of(4);
  SampleRandom random(0, 0, 5);
  const Batch mixed = mixup(batch, 6, 0.4, random);
  EXPECT_EQ(mixed.target.sizes(), (std::vector<int64_t>{4, 6}));
  const double lambda = mixed.target[2][2].item<double>();
  EXPECT_GT(lambda, 0);
  EXPECT_LT(lambda, 1);
  EXPECT_NEAR(mixed.target[2][1].item<double>(), 1 - lambda, 1e-6);
  EXPECT_NEAR(mixed.target[0][3].item<double>(), 1 - lambda, 1e-6);
  EXPECT_TRUE(mixed.target.sum(1).allclose(at::ones({4})));
  EXPECT_TRUE(mixed.data[2].allclose(batch.data[2] * lambda + batch.data[1] * (1 - lambda)));
  EXPECT_TRUE(mixed.data[0].allclose(batch.data[0] * lambda + batch.data[3] * (1 - lambda)));
}

TEST(CutmixTest, PastesARectangleOfThePreviousImage) {
  const Batch batch = batch_of(3);
  for (int64_t number = 0; number < 50; ++number) {
    SampleRandom random(0, 0, number);
    const Batch mixed = cutmix(batch, 3, 1.0, random);
    const at::Tensor own = mixed.data.eq(batch.data);
    EXPECT_TRUE(own.logical_or(mixed.data.eq(batch.data.roll(1, 0))).all().item<bool>());
    // The rectangle is the same in every image and channel; its area determines how labels are
    // mixed.
    EXPECT_TRUE(own.eq(own[0][0]).all().item<bool>());
    const double kept = own[0][0].to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(mixed.target[1][1].item<double>(), kept, 1e-6);
    EXPECT_NEAR(mixed.target[1][0].item<double>(), 1 - kept, 1e-6);
  }
}

TEST(CutmixTest, DoesNotChangeItsArgument) {
  const Batch batch = batch_of(3);
  const at::Tensor before = batch.data.clone();
  SampleRandom random(0, 0, 1);
  cutmix(batch, 3, 1.0, random);
  EXPECT_TRUE(batch.data.equal(before));
}

}  // namespace
}  // namespace syncbn::data

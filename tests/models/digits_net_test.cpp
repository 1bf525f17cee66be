#include <syncbn/models/digits_net.h>

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <vector>

#include <syncbn/base/error.h>

namespace syncbn::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ModelArgs digits_args(Norm norm = Norm::kLocal) {
  return {.num_classes = 10, .sample_shape = {1, 8, 8}, .norm = norm};
}

TEST(DigitsNetTest, MapsImagesToLogits) {
  const auto net = digits_net(digits_args());
  EXPECT_EQ(net->forward(at::rand({5, 1, 8, 8})).sizes(), (std::vector<int64_t>{5, 10}));
}

TEST(DigitsNetTest, NamesAreTheSameWithEitherNorm) {
  const auto local = digits_net(digits_args());
  const auto sync = digits_net(digits_args(Norm::kSync));
  EXPECT_EQ(local->named_parameters().keys(), sync->named_parameters().keys());
  EXPECT_EQ(local->named_buffers().keys(), sync->named_buffers().keys());
  EXPECT_THAT(
      local->named_parameters().keys(),
      ElementsAre("conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight",
                  "bn2.bias", "conv3.weight", "bn3.weight", "bn3.bias", "fc.weight", "fc.bias"));
}

TEST(DigitsNetTest, InitialValuesAreTheSameWithEitherNorm) {
  std::vector<std::shared_ptr<Model>> nets;
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    torch::manual_seed(3);
    nets.push_back(digits_net(digits_args(norm)));
  }
  for (const auto& item : nets[0]->named_parameters()) {
    EXPECT_TRUE(item.value().equal(nets[1]->named_parameters()[item.key()])) << item.key();
  }
}

TEST(DigitsNetTest, OneRankGivesTheSameResultWithEitherNorm) {
  torch::manual_seed(4);
  const at::Tensor images = at::rand({6, 1, 8, 8});
  std::vector<at::Tensor> logits;
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    torch::manual_seed(3);
    logits.push_back(digits_net(digits_args(norm))->forward(images));
  }
  EXPECT_TRUE(at::allclose(logits[0], logits[1], 1e-5, 1e-5));
}

TEST(DigitsNetTest, GivesEveryParameterAGradient) {
  const auto net = digits_net(digits_args());
  net->forward(at::rand({4, 1, 8, 8})).square().sum().backward();
  for (const auto& item : net->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
  }
}

TEST(DigitsNetTest, WidthSetsTheNumberOfChannels) {
  const auto net = digits_net(digits_args(), {.width = 6});
  EXPECT_EQ(net->named_parameters()["conv3.weight"].sizes(), (std::vector<int64_t>{24, 12, 3, 3}));
}

TEST(DigitsNetTest, RefusesImagesThatAreTooSmall) {
  EXPECT_THAT(
      [] {
        digits_net({.num_classes = 10, .sample_shape = {1, 1, 8}});
      },
      ThrowsMessage<base::UserError>(
          HasSubstr("model digits: takes images [channels, height, width] of at least 2 x "
                    "2 pixels, the data set's samples have the shape [1, 1, 8]")));
}

}  // namespace
}  // namespace syncbn::models

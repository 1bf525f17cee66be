#include <syncbn/models/norm.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>

#include <memory>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::models {
namespace {

namespace nn = torch::nn;

struct Layers {
  int local = 0;
  int sync = 0;
};

Layers layers_of(const Model& model) {
  Layers layers;
  for (const auto& module : model.modules()) {
    if (module->as<dist::SyncBatchNorm>() != nullptr) ++layers.sync;
    if (module->as<nn::BatchNorm1d>() != nullptr || module->as<nn::BatchNorm2d>() != nullptr ||
        module->as<nn::BatchNorm3d>() != nullptr) {
      ++layers.local;
    }
  }
  return layers;
}

std::shared_ptr<Model> make(const std::string& type, Norm norm) {
  return config::Component<ModelKind>(type).make(ModelArgs{.norm = norm});
}

class NormTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NormTest, AllLayersOfAModelAreOfItsKind) {
  const Layers local = layers_of(*make(GetParam(), Norm::kLocal));
  EXPECT_GT(local.local, 0);
  EXPECT_EQ(local.sync, 0);
  const Layers sync = layers_of(*make(GetParam(), Norm::kSync));
  EXPECT_EQ(sync.local, 0);
  EXPECT_EQ(sync.sync, local.local);
}

TEST(NormFactoryTest, RefusesOneValuePerChannelInTraining) {
  torch::nn::AnyModule layer = NormFactory({.norm = Norm::kLocal})(4);
  EXPECT_THAT(
      [&] {
        layer.forward(at::ones({1, 4, 1, 1}));
      },
      ::testing::ThrowsMessage<base::UserError>(::testing::HasSubstr(
          "one value per channel (input [1, 4, 1, 1]) has no variance to train with")));
  // Any other mistake is libtorch's, whatever the input's size.
  EXPECT_THROW(layer.forward(at::ones({4})), c10::Error);
  EXPECT_THROW(layer.forward(at::ones({1, 4, 1, 1, 1})), c10::Error);
  layer.ptr()->eval();
  EXPECT_EQ(layer.forward(at::ones({1, 4, 1, 1})).numel(), 4);
}

TEST(NormReluTest, StochasticDepthLeavesSamplesTheirResidualAlone) {
  constexpr double kDropped = 0.25;
  constexpr int64_t kSamples = 4000;
  at::manual_seed(1);
  for (const Norm kind : {Norm::kLocal, Norm::kSync}) {
    NormRelu layer = NormFactory(ModelArgs{.norm = kind}).with_relu(2, kDropped);
    const at::Tensor x = at::randn({kSamples, 2, 2, 1});
    const at::Tensor residual = at::rand({kSamples, 2, 2, 1}) + 10;  // so that sums are positive
    const at::Tensor mean = x.mean({0, 2, 3}, /*keepdim=*/true);
    const at::Tensor deviation = (x.var({0, 2, 3}, /*unbiased=*/false, true) + 1e-5).sqrt();
    const at::Tensor kept = ((x - mean) / deviation / (1 - kDropped) + residual).relu();
    const at::Tensor y = layer.forward(x, residual, /*drops=*/true);
    const at::Tensor is_kept = at::isclose(y, kept, 1e-4, 1e-5).flatten(1).all(1);
    const at::Tensor is_dropped = y.eq(residual).flatten(1).all(1);
    EXPECT_TRUE(is_kept.logical_xor(is_dropped).all().item<bool>());
    EXPECT_NEAR(is_dropped.to(at::kDouble).mean().item<double>(), kDropped, 0.03);

    EXPECT_FALSE(layer.forward(x, residual).eq(residual).flatten(1).all(1).any().item<bool>())
        << "in evaluation no sample is dropped";
  }
}

// One network of each family with batch norm.
INSTANTIATE_TEST_SUITE_P(Models, NormTest,
                         ::testing::Values("digits", "resnet18", "resnet20", "vgg11_bn",
                                           "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0",
                                           "densenet121", "regnet_y_400mf", "shufflenet_v2_x0_5",
                                           "mnasnet0_5"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace syncbn::models

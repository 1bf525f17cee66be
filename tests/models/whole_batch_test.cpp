// SyncBatchNorm over two ranks, against one process with the whole batch.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <syncbn/models/model.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/from_yaml.h"
#include "support/multiproc.h"

namespace syncbn::models {
namespace {

constexpr double kTolerance = 1e-9;  // float64, relative to the largest value
constexpr int64_t kImages = 3;       // one on rank 0, two on rank 1
constexpr int64_t kSide = 80;        // pixels

/// Only batch norm layers are in training mode: dropout would draw different numbers on each rank.
std::shared_ptr<Model> make_network(const std::string& yaml, Norm norm) {
  at::manual_seed(0);
  auto model = test::from_yaml<ModelKind>(yaml, "model")
                   .make(ModelArgs{.num_classes = 5, .sample_shape = {3, 299, 299}, .norm = norm});
  model->to(at::kDouble);
  model->eval();
  int layers = 0;
  for (const auto& module : model->modules()) {
    if (module->as<torch::nn::BatchNorm2d>() == nullptr &&
        module->as<dist::SyncBatchNorm>() == nullptr) {
      continue;
    }
    module->train();
    ++layers;
  }
  EXPECT_GT(layers, 0) << yaml;
  return model;
}

/// The outputs of a forward pass, and the gradients of a number that depends on all of them.
std::vector<at::Tensor> forward_and_backward(Model& model, const at::Tensor& images) {
  const auto outputs = model.forward_all(images);
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;  // anchors
    // Each image has the same weights, whatever its position in the batch.
    const at::Tensor weights = at::sin(at::arange(output[0].numel(), at::kDouble));
    sum = sum + (output * weights.reshape(output[0].sizes())).sum();
  }
  sum.backward();
  return outputs;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, double largest,
                 const std::string& what) {
  EXPECT_LE((actual - expected).abs().max().item<double>(), kTolerance * largest) << what;
}

void expect_whole_batch(int rank, const std::string& yaml) {
  at::manual_seed(1);
  const at::Tensor images = at::randn({kImages, 3, kSide, kSide}, at::kDouble);
  const auto mine = [&](const at::Tensor& all) {
    return rank == 0 ? all.slice(0, 0, 1) : all.slice(0, 1, kImages);
  };
  const auto whole = make_network(yaml, Norm::kLocal);
  const auto expected = forward_and_backward(*whole, images);
  const auto shared = make_network(yaml, Norm::kSync);
  const auto outputs = forward_and_backward(*shared, mine(images));
  ASSERT_EQ(outputs.size(), expected.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    expect_near(outputs[i], mine(expected[i]), expected[i].abs().max().item<double>(),
                "output " + std::to_string(i));
  }
  // Some gradients are zero except for rounding: those of a bias before batch norm.
  double largest = 0;
  for (const at::Tensor& parameter : whole->parameters()) {
    if (!parameter.grad().defined()) continue;  // of an auxiliary head
    largest = std::max(largest, parameter.grad().abs().max().item<double>());
  }
  ASSERT_GT(largest, 0);
  const auto parameters = whole->named_parameters();
  for (const auto& item : shared->named_parameters()) {
    const at::Tensor& of_whole = parameters[item.key()].grad();
    at::Tensor gradient = item.value().grad();
    ASSERT_EQ(gradient.defined(), of_whole.defined()) << item.key();
    if (!gradient.defined()) continue;
    dist::all_reduce(gradient);
    expect_near(gradient, of_whole, largest, item.key());
  }
  const auto buffers = whole->named_buffers();
  for (const auto& item : shared->named_buffers()) {
    const at::Tensor& of_whole = buffers[item.key()];
    // Means after convolutions of zero-mean inputs are zero except for rounding.
    expect_near(item.value(), of_whole, std::max(of_whole.abs().max().item<double>(), 1e-3),
                item.key());
  }
}

class WholeBatchTest : public ::testing::TestWithParam<std::string> {};

TEST_P(WholeBatchTest, IsWhatTwoRanksWithSyncBatchNormCompute) {
  test::run_ranks(2, [](int rank) {
    at::set_num_threads(1);
    dist::init_process_group();
    dist::new_group({0});  // null on rank 1, which must not stand for the networks' default group
    expect_whole_batch(rank, GetParam());
  });
}

// One network of each kind of block that has batch norm.
INSTANTIATE_TEST_SUITE_P(Models, WholeBatchTest,
                         ::testing::Values("digits", "resnet18", "resnet20", "densenet121",
                                           "mobilenet_v2", "mobilenet_v3_small",
                                           "shufflenet_v2_x0_5", "efficientnet_b0",
                                           "lraspp_mobilenet_v3_large", "{type: unet, width: 8}",
                                           "{type: retinanet_resnet18_fpn, head_norm: batch}"));
// The same blocks in other networks, and networks that take long.
INSTANTIATE_TEST_SUITE_P(Exhaustive, WholeBatchTest,
                         ::testing::Values("resnext50_32x4d", "googlenet", "inception_v3",
                                           "mnasnet0_5", "regnet_y_400mf", "fcn_resnet50",
                                           "deeplabv3_mobilenet_v3_large", "pspnet_resnet50",
                                           "deeplabv3plus_resnet50", "retinanet_resnet18_fpn",
                                           "fcos_resnet50_fpn"));

}  // namespace
}  // namespace syncbn::models

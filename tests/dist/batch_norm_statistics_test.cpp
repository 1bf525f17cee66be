// Running statistics that ranks make equal, and that they recompute.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <stdexcept>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/full.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/convert.h"
#include "dist/device.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::distribute_bn;
using dist::SyncBatchNorm;
using dist::update_bn_stats;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::message_of;
using syncbn::test::on_device;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using ::testing::HasSubstr;
using DistributeBnTest = syncbn::test::DeviceTest;
using UpdateBnStatsTest = syncbn::test::DeviceTest;

/// Whether all elements of a tensor, on any device, have exactly this value.
::testing::AssertionResult holds(const at::Tensor& tensor, double value) {
  return close(tensor, at::full(tensor.sizes(), value, tensor.scalar_type()), 0, 0);
}

TEST_F(DistributeBnTest, TakesRankZerosOrTheMean) {
  run_on_device(2, [](int rank) {
    auto net = on_device(nn::Sequential(nn::BatchNorm1d(3), nn::BatchNorm1d(2)));
    const auto& first = *net[0]->as<nn::BatchNorm1d>();
    const auto& second = *net[1]->as<nn::BatchNorm1d>();
    const auto differ = [&] {
      first.running_mean.fill_(rank + 1);
      second.running_var.fill_(10 * rank + 1);
      first.num_batches_tracked.fill_(rank);
    };
    auto* backend = dist::detail::backend_of(dist::default_group());
    differ();
    const uint64_t before = backend->sequence();
    distribute_bn(*net);
    EXPECT_EQ(backend->sequence(), before + 1) << "one collective for all";
    EXPECT_TRUE(holds(first.running_mean, 1.0));
    EXPECT_TRUE(holds(second.running_var, 1.0));
    differ();
    distribute_bn(*net, /*reduce=*/true);
    EXPECT_TRUE(holds(first.running_mean, 1.5));
    EXPECT_TRUE(holds(second.running_var, 6.0));
    EXPECT_EQ(first.num_batches_tracked.item<int64_t>(), rank) << "as timm's";
    EXPECT_TRUE(holds(first.weight, 1.0));
  });
}

TEST_F(DistributeBnTest, KnowsTorchScriptAndGroupsAndOtherTypes) {
  run_on_device(3, [](int rank) {
    const auto group = dist::new_group({0, 2});
    torch::jit::Module layer("BatchNorm1d");
    layer.register_buffer("running_mean", at::full({2}, rank + 0.1, at::kHalf));
    layer.register_buffer("running_var", at::full({2}, rank + 1.0));
    layer.register_buffer("other", at::full({2}, rank + 1.0));
    layer.to(device());
    if (rank == 1) return;
    distribute_bn(layer, /*reduce=*/false, group);
    EXPECT_TRUE(holds(layer.attr("running_mean").toTensor(), 0.1));
    EXPECT_TRUE(holds(layer.attr("running_var").toTensor(), 1.0));
    EXPECT_TRUE(holds(layer.attr("other").toTensor(), rank + 1.0));
  });
}

/// The statistics of a layer's input over all batches.
struct Expected {
  at::Tensor mean, var;
};
Expected statistics(const std::vector<at::Tensor>& batches) {
  const at::Tensor all = at::cat(batches).to(at::kDouble);
  return {all.mean(0), all.var(0, /*unbiased=*/true)};
}

std::vector<at::Tensor> uneven_batches(int rank) {
  at::manual_seed(20 + static_cast<uint64_t>(rank));
  std::vector<at::Tensor> batches;
  for (const int64_t n : {3, 8, 5}) batches.push_back(randn({n, 4}) * 2 + n);
  return batches;
}

template <class Layer>
void expect_exact(bool over_all_ranks, Layer layer, nn::Linear& linear, int rank) {
  const auto run = [&](const at::Tensor& batch) { return layer->forward(linear(batch)); };
  run(randn({4, 4}));  // statistics that must be replaced
  std::vector<at::Tensor> seen;
  for (int other = 0; other < 2; ++other) {
    if (!over_all_ranks && other != rank) continue;
    for (const at::Tensor& batch : uneven_batches(other)) seen.push_back(linear(batch));
  }
  const Expected expected = statistics(seen);
  const at::Tensor tracked = layer->num_batches_tracked.clone();
  const auto batches = uneven_batches(rank);
  update_bn_stats(
      *layer,
      [&](int64_t i) { EXPECT_FALSE(run(batches[static_cast<size_t>(i)]).requires_grad()); },
      static_cast<int64_t>(batches.size()));
  EXPECT_TRUE(close(layer->running_mean, expected.mean));
  EXPECT_TRUE(close(layer->running_var, expected.var));
  EXPECT_TRUE(layer->num_batches_tracked.equal(tracked));
}

TEST_F(UpdateBnStatsTest, IsExactForLayersOfEachKind) {
  run_on_device(2, [](int rank) {
    at::manual_seed(1);
    auto linear = on_device(nn::Linear(4, 3));
    expect_exact(true, on_device(SyncBatchNorm(3)), linear, rank);
    expect_exact(false, on_device(nn::BatchNorm1d(3)), linear, rank);
    auto converted = on_device(nn::BatchNorm1d(3));
    dist::convert_sync_batchnorm(*converted);
    expect_exact(true, converted, linear, rank);
  });
}

constexpr size_t kStatisticsLayers = 5;

/// Convolution, batch norm and ReLU by turns.
template <class Layer>
nn::Sequential images_net() {
  nn::Sequential net;
  for (size_t i = 0; i < kStatisticsLayers; ++i) {
    net->push_back(nn::Conv2d(nn::Conv2dOptions(i == 0 ? 3 : 4, 4, 3).padding(1)));
    net->push_back(Layer(4));
    net->push_back(nn::ReLU());
  }
  return on_device(net);
}

/// One batch per step. Image size and number of images differ between steps, the latter also
/// between ranks.
std::vector<at::Tensor> images(int rank) {
  at::manual_seed(40 + static_cast<uint64_t>(rank));
  std::vector<at::Tensor> batches;
  for (const int64_t size : {5, 9, 6}) {
    batches.push_back(randn({size - 3 + 2 * rank, 3, size, size + 1}) * size + rank);
  }
  return batches;
}

/// The statistics of each layer's input, in float64. All ranks' images of a step are one batch, by
/// whose statistics the layers normalise.
std::vector<Expected> exact_statistics(nn::Sequential& net) {
  const auto exact = [](const at::Tensor& t) { return t.detach().to(at::kCPU, at::kDouble); };
  std::vector<std::vector<at::Tensor>> seen(kStatisticsLayers);
  const auto zeroth = images(0);
  const auto first = images(1);
  for (size_t step = 0; step < zeroth.size(); ++step) {
    at::Tensor x = exact(at::cat({zeroth[step], first[step]}));
    for (size_t i = 0; i < kStatisticsLayers; ++i) {
      const auto& conv = *net[3 * i]->as<nn::Conv2d>();
      x = at::conv2d(x, exact(conv.weight), exact(conv.bias), /*stride=*/1, /*padding=*/1);
      const at::Tensor values = x.transpose(0, 1).flatten(1).t();
      seen[i].push_back(values);
      const auto spread = [](const at::Tensor& t) { return t.view({1, -1, 1, 1}); };
      const at::Tensor var = values.var(0, /*unbiased=*/false);
      x = ((x - spread(values.mean(0))) / spread((var + 1e-5).sqrt())).relu();
    }
  }
  std::vector<Expected> expected;
  for (const auto& values : seen) expected.push_back(statistics(values));
  return expected;
}

template <class Layer>
void expect_exact_for_images(nn::Sequential net, int rank) {
  const auto expected = exact_statistics(net);
  const auto batches = images(rank);
  update_bn_stats(
      *net, [&](int64_t i) { net->forward(batches[static_cast<size_t>(i)]); },
      static_cast<int64_t>(batches.size()));
  for (size_t i = 0; i < kStatisticsLayers; ++i) {
    const auto& layer = *net[3 * i + 1]->template as<Layer>();
    EXPECT_TRUE(close(layer.running_mean, expected[i].mean, 1e-4, 1e-5)) << "layer " << i;
    EXPECT_TRUE(close(layer.running_var, expected[i].var, 1e-4, 1e-5)) << "layer " << i;
  }
}

TEST_F(UpdateBnStatsTest, IsExactForNetworksOfImagesOnAllRanks) {
  run_on_device(2, [](int rank) {
    at::manual_seed(1);
    expect_exact_for_images<SyncBatchNorm>(images_net<SyncBatchNorm>(), rank);
    at::manual_seed(2);
    nn::Sequential converted = images_net<nn::BatchNorm2d>();
    dist::convert_sync_batchnorm(*converted);
    expect_exact_for_images<nn::BatchNorm2d>(converted, rank);
  });
}

TEST_F(UpdateBnStatsTest, LeavesLayersAsTheyWereAndEvaluatedOnesAlone) {
  run_on_device(2, [](int) {
    auto net = on_device(nn::Sequential(nn::BatchNorm1d(3), nn::BatchNorm1d(3)));
    const auto& frozen = *net[1]->as<nn::BatchNorm1d>();
    net[1]->eval();
    const at::Tensor before = frozen.running_mean.clone();
    update_bn_stats(
        *net,
        [&](int64_t) {
          net->forward(randn({4, 3}) + 5);
        },
        2);
    EXPECT_TRUE(frozen.running_mean.equal(before));
    EXPECT_EQ(dist::detail::registered_keys(), 0u) << "not converted any more";
    const at::Tensor batch = randn({4, 3});
    const auto& first = *net[0]->as<nn::BatchNorm1d>();
    const at::Tensor expected = first.running_mean * 0.9 + batch.mean(0) * 0.1;
    net->forward(batch);
    EXPECT_TRUE(close(first.running_mean, expected));
  });
}

TEST_F(UpdateBnStatsTest, AnErrorInForwardChangesNothing) {
  run_on_device(1, [](int) {
    auto layer = on_device(nn::BatchNorm1d(3));
    const at::Tensor before = layer->running_mean.clone();
    EXPECT_THROW(update_bn_stats(
                     *layer,
                     [&](int64_t i) {
                       if (i == 1) throw std::runtime_error("no more data");
                       layer(randn({4, 3}));
                     },
                     2),
                 std::runtime_error);
    EXPECT_TRUE(layer->running_mean.equal(before));
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    EXPECT_THAT(message_of<UserError>([&] {
                  update_bn_stats(
                      *layer, [](int64_t) {}, 0);
                }),
                HasSubstr("num_iters must be positive"));
  });
}

}  // namespace

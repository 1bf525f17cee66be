// Running statistics made equal between ranks, and computed anew.

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
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/convert.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::distribute_bn;
using dist::SyncBatchNorm;
using dist::update_bn_stats;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::HasSubstr;

TEST(DistributeBnTest, TakesRankZerosOrTheMean) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    nn::Sequential net(nn::BatchNorm1d(3), nn::BatchNorm1d(2));
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
    EXPECT_TRUE(first.running_mean.equal(at::full({3}, 1.0)));
    EXPECT_TRUE(second.running_var.equal(at::full({2}, 1.0)));
    differ();
    distribute_bn(*net, /*reduce=*/true);
    EXPECT_TRUE(first.running_mean.equal(at::full({3}, 1.5)));
    EXPECT_TRUE(second.running_var.equal(at::full({2}, 6.0)));
    EXPECT_EQ(first.num_batches_tracked.item<int64_t>(), rank) << "as timm's";
    EXPECT_TRUE(first.weight.equal(at::full({3}, 1.0)));
  });
}

TEST(DistributeBnTest, KnowsTorchScriptAndGroupsAndOtherTypes) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_group({0, 2});
    torch::jit::Module layer("BatchNorm1d");
    layer.register_buffer("running_mean", at::full({2}, rank + 0.1, at::kHalf));
    layer.register_buffer("running_var", at::full({2}, rank + 1.0));
    layer.register_buffer("other", at::full({2}, rank + 1.0));
    if (rank == 1) return;
    distribute_bn(layer, /*reduce=*/false, group);
    EXPECT_TRUE(layer.attr("running_mean").toTensor().equal(at::full({2}, 0.1, at::kHalf)));
    EXPECT_TRUE(layer.attr("running_var").toTensor().equal(at::full({2}, 1.0)));
    EXPECT_TRUE(layer.attr("other").toTensor().equal(at::full({2}, rank + 1.0)));
  });
}

/// The statistics of the second layer's input over all batches.
struct Expected {
  at::Tensor mean, var;
};
Expected statistics(const std::vector<at::Tensor>& batches) {
  const at::Tensor all = at::cat(batches);
  return {all.mean(0), all.var(0, /*unbiased=*/true)};
}

std::vector<at::Tensor> uneven_batches(int rank) {
  at::manual_seed(20 + static_cast<uint64_t>(rank));
  std::vector<at::Tensor> batches;
  for (const int64_t n : {3, 8, 5}) batches.push_back(at::randn({n, 4}) * 2 + n);
  return batches;
}

template <class Layer>
void expect_exact(bool over_all_ranks, Layer layer, nn::Linear& linear, int rank) {
  const auto run = [&](const at::Tensor& batch) { return layer->forward(linear(batch)); };
  run(at::randn({4, 4}));  // something to be replaced
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

TEST(UpdateBnStatsTest, IsExactForLayersOfEachKind) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(1);
    nn::Linear linear(4, 3);
    expect_exact(true, SyncBatchNorm(3), linear, rank);
    expect_exact(false, nn::BatchNorm1d(3), linear, rank);
    nn::BatchNorm1d converted(3);
    dist::convert_sync_batchnorm(*converted);
    expect_exact(true, converted, linear, rank);
  });
}

TEST(UpdateBnStatsTest, LeavesLayersAsTheyWereAndEvaluatedOnesAlone) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::Sequential net(nn::BatchNorm1d(3), nn::BatchNorm1d(3));
    const auto& frozen = *net[1]->as<nn::BatchNorm1d>();
    net[1]->eval();
    const at::Tensor before = frozen.running_mean.clone();
    update_bn_stats(
        *net,
        [&](int64_t) {
          net->forward(at::randn({4, 3}) + 5);
        },
        2);
    EXPECT_TRUE(frozen.running_mean.equal(before));
    EXPECT_EQ(dist::detail::registered_keys(), 0u) << "not converted any more";
    const at::Tensor batch = at::randn({4, 3});
    const auto& first = *net[0]->as<nn::BatchNorm1d>();
    const at::Tensor expected = first.running_mean * 0.9 + batch.mean(0) * 0.1;
    net->forward(batch);
    EXPECT_TRUE(close(first.running_mean, expected));
  });
}

TEST(UpdateBnStatsTest, AnErrorInForwardChangesNothing) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    nn::BatchNorm1d layer(3);
    const at::Tensor before = layer->running_mean.clone();
    EXPECT_THROW(update_bn_stats(
                     *layer,
                     [&](int64_t i) {
                       if (i == 1) throw std::runtime_error("no more data");
                       layer(at::randn({4, 3}));
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

// As many ranks as one machine can run: no code may depend on there being few.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "dist/group.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;

constexpr int kRanks = 32;
constexpr int64_t kSamples = 2;    // on each rank
constexpr double kPatience = 110;  // seconds: the machine may have only two cores
constexpr double kLearningRate = 0.1;

at::Tensor all_samples() {
  at::manual_seed(1);
  return at::randn({kRanks * kSamples, 3});
}

void sgd_step(nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.sub_(parameter.grad(), kLearningRate);
}

nn::Sequential make_net(bool sync) {
  at::manual_seed(0);
  if (sync) return nn::Sequential(nn::Linear(3, 4), dist::SyncBatchNorm(4), nn::Linear(4, 1));
  return nn::Sequential(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Linear(4, 1));
}

TEST(ScaleTest, ThirtyTwoRanksTrainAsOneOnTheWholeBatch) {
  syncbn::test::run_group(
      kRanks,
      [](int rank) {
        nn::Sequential net = make_net(/*sync=*/true);
        nn::Sequential whole = make_net(/*sync=*/false);
        dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
        const at::Tensor samples = all_samples();
        for (int step = 0; step < 3; ++step) {
          ddp.zero_grad();
          ddp(samples.narrow(0, rank * kSamples, kSamples)).square().mean().backward();
          sgd_step(*net);
          whole->zero_grad();
          whole->forward(samples).square().mean().backward();
          sgd_step(*whole);
          const auto parameters = whole->parameters();
          for (size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(at::allclose(net->parameters()[i], parameters[i], 1e-4, 1e-5))
                << "step " << step << " parameter " << i;
          }
        }
      },
      kPatience);
}

TEST(ScaleTest, ThirtyTwoRanksSplitIntoGroups) {
  syncbn::test::run_group(
      kRanks,
      [](int rank) {
        const auto eight = dist::new_subgroups(8);
        at::Tensor sum = at::full({1}, rank);
        dist::all_reduce(sum, c10d::ReduceOp::SUM, eight);
        EXPECT_EQ(sum.item<int64_t>(), 8 * (rank / 8 * 8) + 28);
        dist::all_reduce(sum);
        EXPECT_EQ(sum.item<int64_t>(), 8 * kRanks * (kRanks - 1) / 2);
      },
      kPatience);
}

}  // namespace

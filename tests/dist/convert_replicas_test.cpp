// Converted layers inside torch::nn::parallel::data_parallel, whose replicas are clones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <vector>

#include <ATen/ops/randn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#if __has_include(<cuda_runtime_api.h>)  // libtorch's header includes it, even for CPUs
#include <torch/nn/parallel/data_parallel.h>
#define SYNCBN_HAVE_DATA_PARALLEL
#endif

#include "dist/convert_cases.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using syncbn::base::UserError;
using syncbn::test::kLayers;
using syncbn::test::kSteps;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ConvertReplicasTest : public ::testing::Test {
 protected:
#ifdef SYNCBN_HAVE_DATA_PARALLEL
  /// Runs two replicas, as data_parallel makes them.
  static void run_replicas(const nn::Sequential& net) {
    auto replicas = nn::parallel::replicate(net.ptr(), std::vector<at::Device>(2, at::kCPU));
    nn::parallel::parallel_apply(replicas, std::vector<at::Tensor>(2, at::randn({4, 3})));
  }
#else
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(false, "cuda-headers");
  }
  static void run_replicas(const nn::Sequential&) {}
#endif

  /// Expects a refusal in each step, while the network itself still works.
  static void expect_replicas_are_refused(nn::Sequential net) {
    run_replicas(net);  // before the conversion, replicas work
    dist::convert_sync_batchnorm(*net);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_THAT(message_of<UserError>([&] { run_replicas(net); }),
                  AllOf(HasSubstr("layer"), HasSubstr("data_parallel")));
      net->forward(at::randn({4, 3}));
    }
    dist::revert_sync_batchnorm(*net);
    run_replicas(net);
  }
};

nn::Sequential batch_norms(const nn::BatchNorm1dOptions& options) {
  nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(nn::BatchNorm1d(options));
  return net;
}

TEST_F(ConvertReplicasTest, AreRefusedAlsoWhereTheWeightIsFrozenOrMissing) {
  run_ranks(1, [](int) {
    expect_replicas_are_refused(batch_norms(3));
    expect_replicas_are_refused(batch_norms(nn::BatchNorm1dOptions(3).affine(false)));
    const nn::Sequential frozen = batch_norms(3);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    expect_replicas_are_refused(frozen);
  });
}

TEST_F(ConvertReplicasTest, OfSyncBatchNormItselfAreRefused) {
  run_ranks(1, [](int) {
    for (const bool affine : {true, false}) {
      nn::Sequential net(dist::SyncBatchNorm(dist::SyncBatchNormOptions(3).affine(affine)));
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_THAT(message_of<UserError>([&] { run_replicas(net); }), HasSubstr("data_parallel"));
        net->forward(at::randn({4, 3}));
      }
    }
  });
}

}  // namespace

// SyncBatchNorm over groups that this library did not create: no process compares calls in them,
// and none is told that a rank has ended.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <chrono>
#include <optional>

#include <ATen/Context.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "dist/group.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/thrown.h"
#include "transport/gloo.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A c10d group, as another library would create it.
dist::ProcessGroupPtr plain_gloo_group() {
  const int rank = dist::rank();
  const int size = dist::world_size();
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("plain", dist::default_group()->getStore());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  constexpr auto kType = c10d::ProcessGroup::BackendType::GLOO;
  group->setBackend(
      c10::DeviceType::CPU, kType,
      dist::detail::Gloo(store, rank, size, {"127.0.0.1"}, std::chrono::seconds(30), false)
          .backend());
  group->setDefaultBackend(kType);
  EXPECT_EQ(dist::detail::backend_of(group), nullptr);
  return group;
}

SyncBatchNorm layer_over(const dist::ProcessGroupPtr& group, const char* name, int64_t channels = 3,
                         std::optional<milliseconds> sync_timeout = std::nullopt) {
  return SyncBatchNorm(
      SyncBatchNormOptions(channels).process_group(group).name(name).sync_timeout(sync_timeout));
}

at::Tensor small_batch(int64_t channels = 3) {
  return at::randn({4, channels}).requires_grad_();
}

TEST(UnwatchedLayersTest, TrainAsOnTheWholeBatch) {
  run_group(3, [](int rank) {
    SyncBatchNorm layer = layer_over(plain_gloo_group(), "bn");
    nn::BatchNorm1d reference(3);
    at::manual_seed(0);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor all = at::randn({12, 3});
      const at::Tensor own = all.narrow(0, int64_t{4} * rank, 4).clone().requires_grad_();
      const at::Tensor whole = all.clone().requires_grad_();
      const at::Tensor output = layer(own);
      const at::Tensor expected = reference(whole);
      EXPECT_TRUE(close(output, expected.narrow(0, int64_t{4} * rank, 4), 1e-5, 1e-6));
      output.pow(3).sum().backward();
      expected.pow(3).sum().backward();
      EXPECT_TRUE(close(own.grad(), whole.grad().narrow(0, int64_t{4} * rank, 4), 1e-4, 1e-5));
    }
    EXPECT_TRUE(close(layer->running_var, reference->running_var));
  });
}

TEST(UnwatchedLayersTest, DifferentChannelsAreNamedOnEveryRank) {
  run_group(3, [](int rank) {
    const auto group = plain_gloo_group();
    SyncBatchNorm narrow = layer_over(group, "narrow");
    SyncBatchNorm wide = layer_over(group, "wide", 700);
    narrow(small_batch());
    wide(small_batch(700));
    EXPECT_THAT(
        message_of<UserError>([&] { rank == 1 ? wide(small_batch(700)) : narrow(small_batch()); }),
        AllOf(HasSubstr("ranks 0, 2 in layer 'narrow' (3 channels, Float, exchange 3"),
              HasSubstr("rank 1 in layer 'wide' (700 channels, Float, exchange 3")));
    // The group still works: once the ranks agree, they continue.
    EXPECT_TRUE(narrow(small_batch()).defined());
  });
}

TEST(UnwatchedLayersTest, AForwardOnOneRankAndABackwardOnAnotherAreNamed) {
  run_group(2, [](int rank) {
    SyncBatchNorm layer = layer_over(plain_gloo_group(), "bn");
    const at::Tensor output = layer(small_batch());
    EXPECT_THAT(message_of<UserError>([&] {
                  rank == 0 ? output.sum().backward() : static_cast<void>(layer(small_batch()));
                }),
                AllOf(HasSubstr("rank 0 in layer 'bn' (3 channels, Float, exchange 2 of 9 values)"),
                      HasSubstr("rank 1 in layer 'bn' (3 channels, Float, exchange 2 of 10")));
  });
}

TEST(UnwatchedLayersTest, ARankThatDoesNotComeIsNamedAtTheTimeout) {
  run_group(3, [](int rank) {
    SyncBatchNorm layer = layer_over(plain_gloo_group(), "bn", 3, milliseconds(1500));
    layer(small_batch());
    if (rank != 1) {
      EXPECT_THAT(
          message_of<UnavailableError>([&] { layer(small_batch()); }),
          HasSubstr("rank 1 did not arrive at SyncBatchNorm layer 'bn' (3 channels, Float)"));
    }
    dist::barrier();
  });
}

}  // namespace

// Ranks that are in different SyncBatchNorm layers, or that do not arrive, learn which rank is
// where.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "collectives/gather_rows.h"
#include "dist/group.h"
#include "groups/world.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor batch(int64_t channels = 3) {
  return at::randn({4, channels});
}

TEST(DifferentLayersTest, LayersOfOneWidthAreToldApartByTheirNames) {
  run_group(3, [](int rank) {
    SyncBatchNorm first(SyncBatchNormOptions(3).name("first"));
    SyncBatchNorm second(SyncBatchNormOptions(3).name("second"));
    first(batch());
    second(batch());
    EXPECT_THAT(message_of<UserError>([&] { rank == 1 ? second(batch()) : first(batch()); }),
                AllOf(HasSubstr("ranks 0, 2 in layer 'first' (3 channels, Float, exchange 3)"),
                      HasSubstr("rank 1 in layer 'second' (3 channels, Float, exchange 3)")));
  });
}

TEST(DifferentLayersTest, LayersWithoutANameGoByTheirOrder) {
  run_group(2, [](int rank) {
    // A layer that does not exchange does not count.
    SyncBatchNorm only_here(SyncBatchNormOptions(3));
    only_here->eval();
    if (rank == 0) only_here(batch());
    SyncBatchNorm first(SyncBatchNormOptions(3));
    SyncBatchNorm second(SyncBatchNormOptions(3));
    second(first(batch()));
    EXPECT_THAT(message_of<UserError>([&] { rank == 1 ? second(batch()) : first(batch()); }),
                AllOf(HasSubstr("rank 0 in layer #1 "), HasSubstr("rank 1 in layer #2 ")));
  });
}

TEST(DifferentLayersTest, RanksAreThoseOfTheWorld) {
  run_group(3, [](int rank) {
    const auto group = dist::new_group({1, 2});
    if (rank > 0) {
      const auto options = SyncBatchNormOptions(3).process_group(group);
      SyncBatchNorm layer(SyncBatchNormOptions(options).name(rank == 1 ? "first" : "second"));
      const std::string unknown = "in a layer that this rank has not run";
      EXPECT_THAT(message_of<UserError>([&] { layer(batch()); }),
                  AllOf(HasSubstr("rank 1 " + (rank == 1 ? "in layer 'first'" : unknown)),
                        HasSubstr("rank 2 " + (rank == 2 ? "in layer 'second'" : unknown))));
    }
    dist::barrier();
  });
}

TEST(DifferentLayersTest, ADdpOrAConversionNamesLayers) {
  run_group(2, [](int rank) {
    nn::Sequential net(nn::Linear(3, 3), SyncBatchNorm(3), nn::BatchNorm1d(3));
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
    const auto run = [&](size_t i) {
      i == 1 ? net[i]->as<SyncBatchNorm>()->forward(batch())
             : net[i]->as<nn::BatchNorm1d>()->forward(batch());
    };
    dist::convert_sync_batchnorm(*net);
    run(1);
    run(2);
    EXPECT_THAT(message_of<UserError>([&] { run(rank == 0 ? 1 : 2); }),
                AllOf(HasSubstr("rank 0 in layer '1' "), HasSubstr("rank 1 in layer '2' ")));
  });
}

TEST(DifferentLayersTest, DifferentChannelsAreNamedOnEveryRank) {
  run_group(2, [](int rank) {
    SyncBatchNorm narrow(SyncBatchNormOptions(3).name("narrow"));
    SyncBatchNorm wide(SyncBatchNormOptions(5).name("wide"));
    narrow(batch());
    EXPECT_THAT(message_of<UserError>([&] { rank == 0 ? narrow(batch()) : wide(batch(5)); }),
                AllOf(HasSubstr("the ranks made different calls"),
                      HasSubstr("layer 'narrow' (3 channels, Float)"),
                      HasSubstr("layer 'wide' (5 channels, Float)"), HasSubstr("rank 1")));
  });
}

TEST(DifferentLayersTest, DifferentDtypesAreNamed) {
  run_group(2, [](int rank) {
    SyncBatchNorm layer(SyncBatchNormOptions(3).name("bn"));
    const at::Tensor input = batch().to(rank == 0 ? at::kFloat : at::kBFloat16);
    EXPECT_THAT(message_of<UserError>([&] { layer(input); }),
                AllOf(HasSubstr("rank 0 in layer 'bn' (3 channels, Float"),
                      HasSubstr("rank 1 in layer 'bn' (3 channels, BFloat16")));
    EXPECT_TRUE(layer->running_mean.equal(at::zeros({3})));
  });
}

TEST(DifferentLayersTest, BackwardIsComparedToo) {
  run_group(2, [](int rank) {
    SyncBatchNorm first(SyncBatchNormOptions(3).name("first"));
    SyncBatchNorm second(SyncBatchNormOptions(3).name("second"));
    const at::Tensor a = first(batch().requires_grad_());
    const at::Tensor b = second(batch().requires_grad_());
    EXPECT_THAT(message_of<UserError>([&] { (rank == 0 ? a : b).sum().backward(); }),
                AllOf(HasSubstr("rank 0 in layer 'first'"), HasSubstr("rank 1 in layer 'second'")));
  });
}

TEST(DifferentLayersTest, RowsThatAreMergedOnTheWayAreCompared) {
  // Shared memory gathers up to 256 KiB of all ranks together at once, Gloo a row below 64 KiB.
  for (const auto& [shared_memory, channels] : {std::pair{true, 20000}, std::pair{false, 5000}}) {
    run_group(2, {.shared_memory = shared_memory}, [channels = channels](int rank) {
      SyncBatchNorm first(SyncBatchNormOptions(channels).name("first"));
      SyncBatchNorm second(SyncBatchNormOptions(channels).name("second"));
      const at::Tensor a = first(batch(channels).requires_grad_());
      const at::Tensor b = second(batch(channels).requires_grad_());
      EXPECT_TRUE(dist::detail::merges_in_tree(at::zeros({1, 2 * channels + 3}, at::kDouble),
                                               dist::detail::statistics_group({})));
      EXPECT_THAT(
          message_of<UserError>([&] { (rank == 0 ? a : b).sum().backward(); }),
          AllOf(HasSubstr("rank 0 in layer 'first'"), HasSubstr("rank 1 in layer 'second'")));
    });
  }
}

TEST(DifferentLayersTest, AForwardOnOneRankAndABackwardOnAnotherAreNamed) {
  run_group(2, [](int rank) {
    SyncBatchNorm first(SyncBatchNormOptions(3).name("first"));
    SyncBatchNorm second(SyncBatchNormOptions(4).name("second"));
    const at::Tensor a = first(batch().requires_grad_());
    EXPECT_THAT(message_of<UserError>(
                    [&] { rank == 0 ? a.sum().backward() : static_cast<void>(second(batch(4))); }),
                AllOf(HasSubstr("layer 'first'"), HasSubstr("layer 'second'")));
  });
}

/// Runs a layer twice; the second time rank 1 does not run it, and stays until rank 0 has timed
/// out.
void expect_times_out(int rank, const SyncBatchNormOptions& options, milliseconds timeout) {
  const auto until_then = dist::new_group({0, 1}, milliseconds(60'000));
  SyncBatchNorm layer(options);
  layer(batch());
  if (rank == 1) return dist::barrier(until_then);
  const auto before = std::chrono::steady_clock::now();
  EXPECT_THAT(message_of<UnavailableError>([&] { layer(batch()); }),
              AllOf(HasSubstr("layer 'bn' (3 channels, Float)"), HasSubstr("rank 1"),
                    HasSubstr("imed out"), HasSubstr(std::to_string(timeout.count()) + "ms")));
  const auto waited = std::chrono::steady_clock::now() - before;
  EXPECT_GE(waited, timeout);
  dist::barrier(until_then);
}

// The group's own timeout is half an hour.
TEST(DifferentLayersTest, ARankThatDoesNotComeIsNamedAtTheLayersTimeout) {
  run_group(2, [](int rank) {
    expect_times_out(rank, SyncBatchNormOptions(3).name("bn").sync_timeout(milliseconds(1500)),
                     milliseconds(1500));
  });
}

TEST(DifferentLayersTest, ALayerWithoutATimeoutHasTheGroups) {
  run_group(2, {.timeout = milliseconds(1700)}, [](int rank) {
    expect_times_out(rank, SyncBatchNormOptions(3).name("bn"), milliseconds(1700));
  });
}

// A layer's timeout may also be longer than the group's.
TEST(DifferentLayersTest, TheLayersTimeoutIsTakenInPlaceOfTheGroups) {
  run_group(2, {.timeout = milliseconds(1500)}, [](int rank) {
    SyncBatchNorm layer(SyncBatchNormOptions(3).sync_timeout(milliseconds(60'000)));
    layer(batch());
    if (rank == 1) ::usleep(3'000'000);  // longer than the group's timeout
    layer(batch());
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 2);
  });
}

TEST(DifferentLayersTest, AConvertedLayerHasATimeoutToo) {
  run_group(2, [](int rank) {
    const auto until_then = dist::new_group({0, 1});
    nn::Sequential net(nn::BatchNorm1d(3));
    dist::convert_sync_batchnorm(*net, {}, milliseconds(1500));
    net->forward(batch());
    if (rank == 0) {
      EXPECT_THAT(message_of<UnavailableError>([&] { net->forward(batch()); }),
                  AllOf(HasSubstr("layer '0' (3 channels, Float)"), HasSubstr("rank 1"),
                        HasSubstr("1500ms")));
    }
    dist::barrier(until_then);
  });
}

TEST(DifferentLayersTest, AfterAJoinSpanRanksStillAgree) {
  run_group(2, [](int rank) {
    nn::Sequential net(nn::Linear(3, 3), SyncBatchNorm(3), SyncBatchNorm(3));
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
    for (int epoch = 0; epoch < 2; ++epoch) {
      auto guard = ddp.join();
      for (int step = 0; step < 2 + 2 * rank; ++step) ddp(batch()).sum().backward();
    }
    ddp(batch()).sum().backward();
    EXPECT_EQ(net[1]->as<SyncBatchNorm>()->num_batches_tracked.item<int64_t>(), 9);
  });
}

}  // namespace

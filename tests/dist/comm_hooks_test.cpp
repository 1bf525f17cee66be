#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/linalg_matrix_rank.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "dist/group.h"
#include "dist/tensors.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::HasSubstr;

using SequentialDdp = DistributedDataParallel<nn::SequentialImpl>;

nn::Sequential make_net() {
  at::manual_seed(1);
  return nn::Sequential(nn::Linear(8, 16), nn::Linear(16, 16), nn::Linear(16, 4));
}

/// The gradients of one step in several buckets, averaged by `hook`, or by DDP itself if it is
/// null.
std::vector<at::Tensor> gradients(const dist::CommHook& hook, int rank, int steps = 3) {
  nn::Sequential net = make_net();
  SequentialDdp ddp(net, {.bucket_cap_mb = 0.0005});
  if (hook) ddp.register_comm_hook(hook);
  for (int step = 0; step < steps; ++step) {
    ddp.zero_grad();
    at::manual_seed(10 + step * 2 + rank);
    ddp(at::randn({4, 8})).pow(2).mean().backward();
  }
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : net->parameters()) all.push_back(parameter.grad());
  return all;
}

void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  double rtol, double atol) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(close(actual[i], expected[i], rtol, atol)) << "parameter " << i;
  }
}

TEST(CommHookTest, TheAllReduceHookDoesWhatDdpDoesWithoutOne) {
  run_group(3, [](int rank) {
    expect_close(gradients(dist::allreduce_hook(), rank), gradients(nullptr, rank), 1e-6, 1e-7);
  });
}

TEST(CommHookTest, HalfPrecisionHooksAreOffByTheirPrecisionOnly) {
  run_group(2, [](int rank) {
    const auto exact = gradients(nullptr, rank);
    const auto half = gradients(dist::fp16_compress_hook(), rank);
    expect_close(half, exact, 2e-3, 1e-5);
    expect_close(gradients(dist::bf16_compress_hook(), rank), exact, 2e-2, 1e-3);
    // They were in fact compressed.
    bool differs = false;
    for (size_t i = 0; i < exact.size(); ++i) differs = differs || !half[i].equal(exact[i]);
    EXPECT_TRUE(differs);
  });
}

TEST(CommHookTest, WrappersCompressForAnyHook) {
  run_group(2, [](int rank) {
    expect_close(gradients(dist::fp16_compress_wrapper(dist::allreduce_hook()), rank),
                 gradients(dist::fp16_compress_hook(), rank), 1e-3, 1e-6);
    expect_close(gradients(dist::bf16_compress_wrapper(dist::allreduce_hook()), rank),
                 gradients(dist::bf16_compress_hook(), rank), 1e-2, 1e-4);
  });
}

TEST(CommHookTest, AHookOfTheUsersSeesEveryBucketAndReplacesIt) {
  run_group(2, [](int) {
    nn::Sequential net = make_net();
    SequentialDdp ddp(net, {.bucket_cap_mb = 0.0005});
    std::vector<size_t> seen;
    int64_t elements = 0;
    ddp.register_comm_hook(
        [&](c10d::GradBucket& bucket) {
          seen.push_back(bucket.getIndex());
          elements += bucket.getBuffer().numel();
          auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
          future->markCompleted(at::ones_like(bucket.getBuffer()));
          return future;
        },
        "ones");
    for (int step = 0; step < 2; ++step) {
      seen.clear();
      elements = 0;
      ddp.zero_grad();
      ddp(at::ones({1, 8})).sum().backward();
    }
    EXPECT_GT(seen.size(), 1u);
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    EXPECT_EQ(elements, 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4);
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_TRUE(parameter.grad().equal(at::ones_like(parameter)));
    }
    EXPECT_EQ(ddp.stats().comm_hook, "ones");
  });
}

TEST(CommHookTest, WhatAHookReturnsIsChecked) {
  run_group(1, [](int) {
    const auto message = [](const c10::IValue& value) {
      SequentialDdp ddp(make_net());
      ddp.register_comm_hook(
          [&](c10d::GradBucket&) {
            auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
            future->markCompleted(value);
            return future;
          },
          "mine");
      return message_of<UserError>([&] { ddp(at::ones({1, 8})).sum().backward(); });
    };
    EXPECT_THAT(message(at::ones({7})),
                HasSubstr("'mine' returned 7 of Float; the bucket has 484"));
    EXPECT_THAT(message(at::ones({484}, at::kLong)), HasSubstr("484 of Long"));
    EXPECT_THAT(message(at::Tensor()), HasSubstr("undefined tensor"));
    EXPECT_THAT(message(3), HasSubstr("Int in place of a tensor"));
    SequentialDdp ddp(make_net());
    ddp.register_comm_hook([](c10d::GradBucket&) { return dist::FuturePtr(); });
    EXPECT_THROW(ddp(at::ones({1, 8})).sum().backward(), UserError);
  });
}

TEST(CommHookTest, AfterAHookThatFailedTheWrapperSaysSo) {
  run_group(1, [](int) {
    SequentialDdp ddp(make_net());
    ddp.register_comm_hook(
        [](c10d::GradBucket&) -> dist::FuturePtr { throw std::runtime_error("no paper"); });
    EXPECT_THAT(message_of<std::runtime_error>([&] {
                  ddp(at::ones({1, 8})).sum().backward();
                }),
                HasSubstr("no paper"));
    EXPECT_THAT(message_of<UserError>([&] {
                  ddp(at::ones({1, 8}));
                }),
                HasSubstr("the communication hook failed in an earlier step"));
  });
}

TEST(CommHookTest, ABucketMayCompleteAfterTheWrapperWasUnwound) {
  run_group(1, [](int) {
    dist::FuturePtr late;
    const auto train = [&late] {
      SequentialDdp ddp(make_net(), {.bucket_cap_mb = 0.0005});
      ddp(at::ones({1, 8})).sum().backward();  // from the next step on there are several buckets
      ddp.register_comm_hook([&late](c10d::GradBucket&) {
        if (late) throw std::runtime_error("no paper");
        late = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        return late;
      });
      ddp(at::ones({1, 8})).sum().backward();
    };
    EXPECT_THAT(message_of<std::runtime_error>(train), HasSubstr("no paper"));
    // Reuse and overwrite the freed memory.
    std::vector<std::string> others;
    for (size_t size = 16; size <= 512; size += 8) {
      for (int i = 0; i < 50; ++i) others.emplace_back(size, '\xff');
    }
    late->markCompleted(at::ones({7}));  // the wrong size is an error, which is recorded
  });
}

TEST(CommHookTest, ASecondHookIsRefused) {
  run_group(1, [](int) {
    SequentialDdp ddp(make_net());
    ddp.register_comm_hook(dist::allreduce_hook());
    EXPECT_THROW(ddp.register_comm_hook(dist::fp16_compress_hook()), UserError);
    EXPECT_THROW(SequentialDdp(make_net()).register_comm_hook(nullptr), UserError);
  });
}

/// The gradient of one weight after `steps` steps, compressed from the third step on.
at::Tensor power_sgd_gradient(const dist::PowerSgdOptions& options, int rank, int steps) {
  at::manual_seed(2);
  nn::Linear net(nn::LinearOptions(24, 20).bias(false));
  DistributedDataParallel<nn::LinearImpl> ddp(net);
  ddp.register_comm_hook(dist::power_sgd_hook(options));
  for (int step = 0; step < steps; ++step) {
    ddp.zero_grad();
    at::manual_seed(20 + rank);  // the same gradient in each step
    ddp(at::randn({16, 24})).pow(2).mean().backward();
  }
  return net->weight.grad();
}

TEST(PowerSgdTest, GradientsHaveTheRankAskedForOnceItStarts) {
  run_group(2, [](int rank) {
    const dist::PowerSgdOptions options{
        .matrix_approximation_rank = 2, .start_power_sgd_iter = 2, .use_error_feedback = false};
    const at::Tensor exact = power_sgd_gradient(options, rank, 2);
    const at::Tensor compressed = power_sgd_gradient(options, rank, 3);
    EXPECT_GT(at::linalg_matrix_rank(exact, 1e-4).item<int64_t>(), 2);
    EXPECT_EQ(at::linalg_matrix_rank(compressed, 1e-4).item<int64_t>(), 2);
    const auto all = dist::all_gather(compressed);
    EXPECT_TRUE(all[0].equal(all[1])) << "the same on all ranks";
  });
}

TEST(PowerSgdTest, AFullRankApproximationIsExact) {
  run_group(2, [](int rank) {
    const dist::PowerSgdOptions options{
        .matrix_approximation_rank = 20, .start_power_sgd_iter = 2, .min_compression_rate = 0.1};
    EXPECT_TRUE(close(power_sgd_gradient(options, rank, 3), power_sgd_gradient(options, rank, 2),
                      1e-3, 1e-6));
  });
}

TEST(PowerSgdTest, ErrorFeedbackMakesUpForWhatWasLeftOut) {
  run_group(2, [](int rank) {
    // With the same gradient g in each step, the sum of n compressed gradients approaches n g.
    at::manual_seed(2);
    nn::Linear net(nn::LinearOptions(24, 20).bias(false));
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    ddp.register_comm_hook(dist::power_sgd_hook({.start_power_sgd_iter = 2}));
    at::Tensor exact;
    at::Tensor sum = at::zeros({20, 24});
    constexpr int kSteps = 60;
    for (int step = 0; step < 2 + kSteps; ++step) {
      ddp.zero_grad();
      at::manual_seed(20 + rank);
      ddp(at::randn({16, 24})).pow(2).mean().backward();
      if (step == 1) exact = net->weight.grad().clone();
      if (step >= 2) sum += net->weight.grad();
    }
    const at::Tensor error = (sum / kSteps - exact).norm() / exact.norm();
    EXPECT_LT(error.item<double>(), 0.5);
  });
}

TEST(PowerSgdTest, AHookThatTwoWrappersShareIsRefused) {
  run_group(1, [](int) {
    const dist::CommHook hook = dist::power_sgd_hook({.start_power_sgd_iter = 2});
    const auto train = [&hook](int64_t width) {
      DistributedDataParallel<nn::LinearImpl> ddp(nn::Linear(24, width));
      ddp.register_comm_hook(hook);
      for (int step = 0; step < 3; ++step) ddp(at::randn({16, 24})).pow(2).mean().backward();
    };
    train(20);
    EXPECT_THAT(message_of<UserError>([&] { train(30); }),
                HasSubstr("a bucket has 750 values and had 500 before"));
  });
}

TEST(PowerSgdTest, SmallGradientsTravelAsTheyAre) {
  run_group(2, [](int rank) {
    const auto hook =
        dist::power_sgd_hook({.start_power_sgd_iter = 2, .min_compression_rate = 1e9});
    expect_close(gradients(hook, rank), gradients(nullptr, rank), 1e-6, 1e-7);
  });
}

TEST(PowerSgdTest, BatchingGradientsOfOneShapeGivesTheSame) {
  run_group(2, [](int rank) {
    const auto with = [&](bool batched) {
      at::manual_seed(3);
      nn::Sequential net(nn::Linear(16, 16), nn::Linear(16, 16), nn::Linear(16, 16));
      SequentialDdp ddp(net);
      ddp.register_comm_hook(dist::power_sgd_hook(
          {.start_power_sgd_iter = 2, .batch_tensors_with_same_shape = batched}));
      for (int step = 0; step < 5; ++step) {
        ddp.zero_grad();
        at::manual_seed(step * 2 + rank);
        ddp(at::randn({4, 16})).pow(2).mean().backward();
      }
      std::vector<at::Tensor> all;
      for (const at::Tensor& parameter : net->parameters()) all.push_back(parameter.grad());
      return all;
    };
    expect_close(with(true), with(false), 1e-4, 1e-6);
  });
}

TEST(PowerSgdTest, OptionsThatCannotWorkAreRefused) {
  EXPECT_THROW(dist::power_sgd_hook({.matrix_approximation_rank = 0}), UserError);
  EXPECT_THROW(dist::power_sgd_hook({.start_power_sgd_iter = 1}), UserError);
  EXPECT_NO_THROW(dist::power_sgd_hook(
      {.start_power_sgd_iter = 0, .use_error_feedback = false, .warm_start = false}));
}

}  // namespace

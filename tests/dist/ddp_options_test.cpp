// Modules that DistributedDataParallel accepts besides plain ones, and each of its options.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>

#include <filesystem>
#include <map>
#include <variant>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "ddp/ddp_state.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Use { kLeft, kRight, kBoth };

struct SidesImpl : nn::Module {
  SidesImpl() {
    left = register_module("left", nn::Linear(nn::LinearOptions(2, 2).bias(false)));
    right = register_module("right", nn::Linear(nn::LinearOptions(2, 2).bias(false)));
  }
  at::Tensor forward(const at::Tensor& input, Use use) {
    if (use == Use::kBoth) return left(input) + right(input);
    return use == Use::kRight ? right(input) : left(input);
  }
  nn::Linear left{nullptr}, right{nullptr};
};

TEST(TensorTreeTest, VisitsTensorsInContainers) {
  using Map = std::map<std::string, std::pair<at::Tensor, bool>>;
  std::tuple<int, std::vector<std::pair<at::Tensor, std::string>>, std::optional<at::Tensor>,
             std::variant<std::monostate, at::Tensor>, Map, std::filesystem::path>
      all{0,
          {{at::full({1}, 1.0), "one"}, {at::Tensor(), "undefined"}},
          at::full({1}, 2.0),
          at::full({1}, 3.0),
          {{"key", {at::full({1}, 4.0), true}}},
          "a/b"};
  std::vector<double> seen;
  dist::detail::for_each_tensor(all, [&](at::Tensor& tensor) {
    seen.push_back(tensor.item<double>());
    tensor = tensor * 10;
  });
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(std::get<Map>(all)["key"].first.item<double>(), 40);
}

class OwnKind {
 public:
  explicit OwnKind(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  template <class Visit>
  void for_each_tensor(const Visit& visit) {
    visit(tensor_);
  }

 private:
  at::Tensor tensor_;
};

TEST(TensorTreeTest, AClassOfItsOwnKindShowsItsTensors) {
  std::vector<OwnKind> all{OwnKind(at::ones({1}))};
  int count = 0;
  dist::detail::for_each_tensor(all, [&](at::Tensor&) { ++count; });
  EXPECT_EQ(count, 1);
}

TEST(TensorTreeTest, ArgumentsGoToTheDeviceInsideContainersToo) {
  const std::vector<at::Tensor> arguments{at::ones({2}), at::Tensor()};
  const auto moved = dist::detail::to_device(arguments, at::Device(at::kMeta));
  EXPECT_EQ(moved[0].device(), at::Device(at::kMeta));
  EXPECT_FALSE(moved[1].defined());
  EXPECT_EQ(arguments[0].device(), at::Device(at::kCPU)) << "the caller keeps its own";
  const auto left_alone = dist::detail::to_device(arguments, std::nullopt);
  EXPECT_TRUE(left_alone[0].is_same(arguments[0]));
}

struct StructOutputImpl : nn::Module {
  struct Output {
    at::Tensor scores;
    std::vector<at::Tensor> features;
    int64_t number;

    template <class Visit>
    void for_each_tensor(const Visit& visit) {
      visit(scores);
      visit(features);
    }
  };
  StructOutputImpl() {
    used = register_module("used", nn::Linear(2, 2));
    unused = register_module("unused", nn::Linear(2, 2));
  }
  Output forward(const std::vector<at::Tensor>& inputs) {
    return {at::Tensor(), {used(inputs[0])}, 7};
  }
  nn::Linear used{nullptr}, unused{nullptr};
};

TEST(DdpOutputTest, TensorsInStructsAreFoundInTheSearchForUnusedParameters) {
  run_group(2, [](int rank) {
    auto net = std::make_shared<StructOutputImpl>();
    DistributedDataParallel<StructOutputImpl> ddp(net, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      const auto output = ddp(std::vector<at::Tensor>{at::full({1, 2}, rank * 2.0)});
      EXPECT_EQ(output.number, 7);
      output.features[0].sum().backward();
      EXPECT_TRUE(close(net->used->weight.grad(), at::ones({2, 2})));
      EXPECT_FALSE(net->unused->weight.grad().defined());
    }
  });
}

TEST(DdpOptionsTest, AStaticGraphFindsUnusedParametersOnce) {
  run_group(2, [](int rank) {
    auto net = std::make_shared<SidesImpl>();
    DistributedDataParallel<SidesImpl> ddp(net, {.static_graph = true});
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      ddp(at::full({1, 2}, rank * 2.0 + step), Use::kLeft).sum().backward();
      EXPECT_TRUE(close(net->left->weight.grad(), at::full({2, 2}, 1.0 + step))) << step;
      EXPECT_FALSE(net->right->weight.grad().defined());
    }
  });
}

TEST(DdpOptionsTest, SkippingUnusedBucketsLeavesTheirGradientsAlone) {
  run_group(2, [](int) {
    auto net = std::make_shared<SidesImpl>();
    DistributedDataParallel<SidesImpl> ddp(net, {.find_unused_parameters = true,
                                                 .skip_all_reduce_unused_params = true,
                                                 .bucket_cap_mb = 1e-6});
    const auto collectives = [] {
      return dist::detail::backend_of(dist::default_group())->sequence();
    };
    std::vector<uint64_t> counts;
    for (const Use use : {Use::kLeft, Use::kBoth, Use::kRight, Use::kBoth}) {
      const uint64_t before = collectives();
      ddp.zero_grad();
      ddp(at::ones({1, 2}), use).sum().backward();
      EXPECT_EQ(net->left->weight.grad().defined(), use != Use::kRight);
      EXPECT_EQ(net->right->weight.grad().defined(), use != Use::kLeft);
      counts.push_back(collectives() - before);
    }
    // One bucket per parameter.
    EXPECT_EQ(counts[0], counts[1] - 1);
    EXPECT_EQ(counts[2], counts[1] - 1) << "the first parameter's, too";
    EXPECT_EQ(counts[3], counts[1]);
  });
}

TEST(DdpOptionsTest, WithoutInitSyncEveryRankKeepsItsWeights) {
  run_group(2, [](int rank) {
    nn::Linear net(nn::LinearOptions(2, 1).bias(false));
    {
      const at::NoGradGuard no_grad;
      net->weight.fill_(rank);
    }
    DistributedDataParallel<nn::LinearImpl> ddp(net, {.init_sync = false});
    EXPECT_TRUE(net->weight.equal(at::full({1, 2}, static_cast<double>(rank))));
    ddp(at::full({1, 2}, rank + 1.0)).sum().backward();
    EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 1.5)));
  });
}

TEST(DdpOptionsTest, WithoutBufferBroadcastBuffersAreNotSyncedAtTheBeginningEither) {
  run_group(2, [](int rank) {
    for (const bool broadcast : {true, false}) {
      nn::BatchNorm1d net(3);
      net->running_mean.fill_(rank);
      DistributedDataParallel<nn::BatchNorm1dImpl> ddp(net, {.broadcast_buffers = broadcast});
      EXPECT_EQ(net->running_mean[0].item<int>(), broadcast ? 0 : rank);
    }
  });
}

TEST(DdpOptionsTest, IgnoredParametersAndBuffersStayThisRanks) {
  run_group(2, [](int rank) {
    nn::Sequential net(nn::Linear(nn::LinearOptions(2, 3).bias(false)), nn::BatchNorm1d(3));
    auto parameters = net->named_parameters();
    auto buffers = net->named_buffers();
    {
      const at::NoGradGuard no_grad;
      for (const auto& item : parameters) item.value().fill_(rank + 1);
      for (const auto& item : buffers) item.value().fill_(rank + 1);
    }
    DistributedDataParallel<nn::SequentialImpl> ddp(
        net, {.parameters_to_ignore = {"0.weight", "1.running_mean"}});
    EXPECT_EQ(parameters["0.weight"][0][0].item<int>(), rank + 1);
    EXPECT_EQ(buffers["1.running_mean"][0].item<int>(), rank + 1);
    EXPECT_EQ(parameters["1.weight"][0].item<int>(), 1);
    EXPECT_EQ(buffers["1.running_var"][0].item<int>(), 1);
    at::manual_seed(rank);
    ddp(at::randn({4, 2})).pow(3).sum().backward();
    const auto all = [](const at::Tensor& tensor) { return dist::all_gather(tensor); };
    const auto ignored = all(parameters["0.weight"].grad());
    EXPECT_FALSE(ignored[0].equal(ignored[1]));
    const auto averaged = all(parameters["1.weight"].grad());
    EXPECT_TRUE(averaged[0].equal(averaged[1]));
  });
}

TEST(DdpOptionsTest, AnUnknownNameToIgnoreIsRefused) {
  run_group(1, [](int) {
    nn::Linear net(2, 1);
    EXPECT_THAT(message_of<UserError>([&] {
                  DistributedDataParallel<nn::LinearImpl>(net,
                                                          {.parameters_to_ignore = {"wieght"}});
                }),
                HasSubstr("'wieght'"));
    EXPECT_THAT(message_of<UserError>(
                    [&] { DistributedDataParallel<nn::LinearImpl>(net, {.bucket_cap_mb = 0.0}); }),
                HasSubstr("bucket_cap_mb must be above 0 and at most 1000000, got 0"));
    EXPECT_THAT(message_of<UserError>([&] {
                  DistributedDataParallel<nn::LinearImpl>(net, {.first_bucket_cap_mb = -1.0});
                }),
                HasSubstr("first_bucket_cap_mb must be above 0 and at most 1000000, got -1"));
  });
}

TEST(DdpOptionsTest, BucketsAreAsLargeAsAskedFor) {
  run_group(2, [](int) {
    constexpr double kKiB = 1.0 / 1024;
    const auto buckets_after_two_steps = [](const dist::DdpOptions& options) {
      nn::Sequential net;
      for (int i = 0; i < 4; ++i) net->push_back(nn::Linear(nn::LinearOptions(16, 16).bias(false)));
      DistributedDataParallel<nn::SequentialImpl> ddp(net, options);
      for (int step = 0; step < 2; ++step) ddp(at::ones({1, 16})).sum().backward();
      return ddp.stats().bucket_sizes;
    };
    // Each layer has 1 KiB. A bucket is complete when it reaches its size.
    EXPECT_THAT(buckets_after_two_steps({}), ElementsAre(4096));
    EXPECT_THAT(buckets_after_two_steps({.bucket_cap_mb = 2 * kKiB}), ElementsAre(2048, 2048));
    EXPECT_THAT(buckets_after_two_steps({.bucket_cap_mb = 2 * kKiB, .first_bucket_cap_mb = kKiB}),
                ElementsAre(1024, 2048, 1024));
  });
}

TEST(DdpOptionsTest, GradientsThatAreBucketViewsCanBeZeroedByAnyone) {
  run_group(2, [](int rank) {
    at::manual_seed(1);
    nn::Linear net(nn::LinearOptions(3, 2).bias(false));
    DistributedDataParallel<nn::LinearImpl> ddp(net, {.gradient_as_bucket_view = true});
    torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.1);
    const auto step = [&](double value) {
      ddp(at::full({1, 3}, value * (rank + 1))).sum().backward();
      EXPECT_TRUE(close(net->weight.grad(), at::full({2, 3}, value * 1.5))) << value;
    };
    step(1);
    optimizer.zero_grad();
    EXPECT_FALSE(net->weight.grad().defined());
    step(5);  // with the rebuilt buckets
    optimizer.zero_grad(/*set_to_none=*/false);
    EXPECT_TRUE(net->weight.grad().equal(at::zeros({2, 3})));
    const void* const memory = net->weight.grad().data_ptr();
    step(2);
    EXPECT_EQ(net->weight.grad().data_ptr(), memory) << "still in the bucket";
    ddp.zero_grad();
    step(4);
  });
}

TEST(DdpOptionsTest, NoSyncGuardsMayEndInAnyOrder) {
  run_group(2, [](int rank) {
    nn::Linear net(nn::LinearOptions(2, 1).bias(false));
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    std::unique_ptr<dist::NoSyncGuard> first(new dist::NoSyncGuard(ddp.no_sync()));
    std::unique_ptr<dist::NoSyncGuard> second(new dist::NoSyncGuard(ddp.no_sync()));
    first.reset();
    second.reset();
    ddp(at::full({1, 2}, rank * 2.0)).sum().backward();
    EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 1.0)));
  });
}

TEST(DdpOptionsTest, AModuleThatComputesNothingOnSomePathsIsWaitedFor) {
  run_group(2, [](int rank) {
    struct MaybeImpl : nn::Module {
      MaybeImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
      at::Tensor forward(const at::Tensor& input, bool use) { return use ? linear(input) : input; }
      nn::Linear linear{nullptr};
    };
    auto net = std::make_shared<MaybeImpl>();
    DistributedDataParallel<MaybeImpl> ddp(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      // Rank 1's output depends on its input only: no parameter has a gradient there.
      ddp(at::ones({1, 2}), rank == 0).sum().backward();
      EXPECT_TRUE(close(net->linear->weight.grad(), at::full({2, 2}, 0.5)));
    }
  });
}

TEST(DdpErrorTest, AParameterWithoutAGradientIsNamedInTheNextStep) {
  run_group(1, [](int) {
    auto net = std::make_shared<SidesImpl>();
    DistributedDataParallel<SidesImpl> ddp(net);
    ddp(at::ones({1, 2}), Use::kLeft).sum().backward();
    EXPECT_THAT(message_of<UserError>([&] {
                  ddp(at::ones({1, 2}), Use::kLeft);
                }),
                AllOf(HasSubstr("got no gradient"), HasSubstr(": right.weight;"),
                      HasSubstr("find_unused_parameters")));
  });
}

TEST(DdpErrorTest, ADifferentNumberOfParametersIsNamedOnEveryRank) {
  run_group(3, [](int rank) {
    nn::Sequential net(nn::Linear(2, 2));
    if (rank == 2) net->push_back(nn::Linear(2, 2));
    EXPECT_THAT(
        message_of<UserError>([&] { DistributedDataParallel<nn::SequentialImpl> ddp(net); }),
        AllOf(HasSubstr("rank 0 has nothing"), HasSubstr("rank 2 has 1.weight [2, 2]")));
    // The group still works.
    dist::barrier();
  });
}

TEST(DdpErrorTest, RanksOfASubgroupAreNamedAsInTheWorld) {
  run_group(3, [](int rank) {
    const auto group = dist::new_group({1, 2});
    if (rank == 0) return dist::barrier();
    nn::Linear net(rank, 2);
    EXPECT_THAT(
        message_of<UserError>(
            [&] { DistributedDataParallel<nn::LinearImpl> ddp(net, {.process_group = group}); }),
        AllOf(HasSubstr("rank 1 has weight [2, 1]"), HasSubstr("rank 2 has weight [2, 2]")));
    dist::barrier();
  });
}

TEST(DdpErrorTest, FrozenParametersAndBuffersAreComparedToo) {
  run_group(2, [](int rank) {
    nn::Sequential net(nn::Linear(2, 2), nn::BatchNorm1d(2));
    net->named_parameters()["0.bias"].set_requires_grad(rank == 0);
    EXPECT_THAT(
        message_of<UserError>([&] { DistributedDataParallel<nn::SequentialImpl> ddp(net); }),
        AllOf(HasSubstr("rank 0 has 0.bias [2] Float,"),
              HasSubstr("rank 1 has 0.bias [2] Float (without gradient)")));
    nn::Sequential other(nn::Linear(2, 2), nn::BatchNorm1d(nn::BatchNormOptions(2).affine(true)));
    if (rank == 1) other->register_buffer("table", at::ones({3}));
    EXPECT_THAT(
        message_of<UserError>([&] { DistributedDataParallel<nn::SequentialImpl> ddp(other); }),
        HasSubstr("table [3] Float (buffer)"));
  });
}

TEST(DdpErrorTest, OptionsThatDifferAreNamed) {
  run_group(2, [](int rank) {
    nn::Linear net(2, 2);
    EXPECT_THAT(
        message_of<UserError>([&] {
          DistributedDataParallel<nn::LinearImpl> ddp(net, {.find_unused_parameters = rank == 1});
        }),
        AllOf(HasSubstr("rank 0 has the options"), HasSubstr("find_unused_parameters=true")));
  });
}

TEST(DdpErrorTest, AModuleThatIsConvertedAfterWrappingIsRefused) {
  run_group(1, [](int) {
    nn::Linear net(2, 2);
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    ddp(at::ones({1, 2})).sum().backward();
    net->to(at::kDouble);
    EXPECT_THAT(message_of<UserError>([&] {
                  ddp(at::ones({1, 2}, at::kDouble));
                }),
                AllOf(HasSubstr("weight was moved or converted"), HasSubstr("Double on cpu")));
  });
}

TEST(DdpErrorTest, NoModuleIsRefused) {
  run_group(1, [](int) {
    using Ddp = DistributedDataParallel<nn::LinearImpl>;
    EXPECT_THAT(message_of<UserError>([] { Ddp ddp(std::shared_ptr<nn::LinearImpl>{}); }),
                HasSubstr("null"));
    EXPECT_THAT(message_of<UserError>([] { Ddp ddp(nn::Linear{nullptr}); }), HasSubstr("null"));
  });
}

TEST(DdpErrorTest, DevicesOfAModuleAreChecked) {
  const at::Device gpu0(at::kCUDA, 0);
  const at::Device gpu1(at::kCUDA, 1);
  using dist::detail::check_devices;
  EXPECT_EQ(check_devices({gpu1, gpu1}), gpu1);
  EXPECT_EQ(check_devices({gpu0, gpu1}), std::nullopt) << "inputs are not moved";
  EXPECT_THAT(message_of<UserError>([&] {
                check_devices({gpu0, at::kCPU});
              }),
              AllOf(HasSubstr("cuda:0"), HasSubstr("cpu")));
}

TEST(DdpOutputTest, OutputsMayBeModifiedInPlace) {
  run_group(2, [](int) {
    for (const dist::DdpOptions& options :
         {dist::DdpOptions{.find_unused_parameters = true}, dist::DdpOptions{.static_graph = true},
          dist::DdpOptions{.gradient_as_bucket_view = true}}) {
      nn::Linear net(nn::LinearOptions(2, 1).bias(false));
      DistributedDataParallel<nn::LinearImpl> ddp(net, options);
      ddp(at::ones({1, 2})).mul_(3).sum().backward();
      EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 3.0)));
    }
  });
}

TEST(DdpOptionsTest, AStaticGraphGoesByTheForwardNotByTheBackward) {
  run_group(2, [](int rank) {
    nn::Linear net(nn::LinearOptions(2, 1).bias(false));
    DistributedDataParallel<nn::LinearImpl> ddp(net, {.static_graph = true});
    const at::Tensor loss = ddp(at::full({1, 2}, rank * 2.0)).sum();
    const auto guard = ddp.no_sync();
    loss.backward();
    EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 1.0)));
  });
}

TEST(DdpLifetimeTest, GuardsAndOutputsMayOutliveTheWrapper) {
  run_group(1, [](int) {
    nn::Linear net(2, 1);
    auto ddp = std::make_unique<DistributedDataParallel<nn::LinearImpl>>(
        net, dist::DdpOptions{.find_unused_parameters = true});
    const at::Tensor output = (*ddp)(at::ones({1, 2}));
    const auto no_sync = ddp->no_sync();
    const auto join = ddp->join();
    ddp.reset();
    EXPECT_EQ(output.numel(), 1);
  });
}

TEST(DdpStatsTest, NumbersOfTheEngineAreThere) {
  run_group(2, [](int) {
    nn::Sequential net(nn::Linear(8, 8), nn::Linear(8, 8));
    DistributedDataParallel<nn::SequentialImpl> ddp(net);
    EXPECT_EQ(ddp.stats().iteration, 0);
    for (int step = 0; step < 3; ++step) ddp(at::ones({2, 8})).sum().backward();
    const dist::DdpStats stats = ddp.stats();
    EXPECT_EQ(stats.iteration, 2) << "when the third began";
    EXPECT_EQ(stats.num_parameter_tensors, 4);
    EXPECT_EQ(stats.total_parameter_size_bytes, 4 * (2 * 64 + 2 * 8));
    EXPECT_GT(stats.forward_compute_time.count(), 0);
    EXPECT_GT(stats.backward_compute_time.count(), 0);
    EXPECT_GT(stats.backward_comm_time.count(), 0);
    EXPECT_TRUE(stats.has_rebuilt_buckets);
    EXPECT_EQ(stats.comm_hook, "");
  });
}

}  // namespace

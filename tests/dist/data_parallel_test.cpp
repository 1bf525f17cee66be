// DataParallel over several replicas on the CPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/checkpoint.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/replica_scope.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DataParallel;
using dist::DataParallelOptions;
using dist::ReplicaError;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::expect_same_state;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::sgd_step;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;

DataParallelOptions on_cpus(size_t count) {
  return {.device_ids = std::vector<at::Device>(count, at::kCPU),
          .sync_timeout = std::chrono::seconds(60)};
}

/// A network with two layers of batch normalisation, of the given type, between convolutions.
template <class BatchNorm>
struct NetImpl : nn::Cloneable<NetImpl<BatchNorm>> {
  NetImpl() { reset(); }
  void reset() override {
    conv1 = this->register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 6, 3).bias(false)));
    bn1 = this->register_module("bn1", BatchNorm(6));
    conv2 = this->register_module("conv2", nn::Conv2d(6, 4, 2));
    bn2 = this->register_module("bn2", BatchNorm(4));
  }
  at::Tensor forward(const at::Tensor& x) {
    return bn2->forward(conv2(at::relu(bn1->forward(conv1(x))))).mean({2, 3});
  }
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  BatchNorm bn1{nullptr}, bn2{nullptr};
};
using PlainNet = NetImpl<nn::BatchNorm2d>;
using SyncNet = NetImpl<dist::SyncBatchNorm>;

template <class Net>
std::shared_ptr<Net> make_net() {
  at::manual_seed(1);
  auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  return net;
}

/// Trains on batches of these sizes. The module's gradients and buffers must equal those of the
/// whole batch.
template <class Net>
void expect_whole_batch(DataParallel<Net>& dp, PlainNet& reference,
                        const std::vector<int64_t>& batches, double tolerance = 1e-12) {
  for (const int64_t samples : batches) {
    SCOPED_TRACE(samples);
    const at::Tensor images = at::randn({samples, 3, 8, 8}, at::kDouble);
    const at::Tensor own = images.clone().requires_grad_();
    const at::Tensor whole = images.clone().requires_grad_();
    const at::Tensor output = dp(own);
    const at::Tensor expected = reference.forward(whole);
    EXPECT_TRUE(close(output, expected, tolerance, tolerance));
    output.pow(3).sum().backward();
    expected.pow(3).sum().backward();
    EXPECT_TRUE(close(own.grad(), whole.grad(), tolerance, tolerance));
    expect_same_state(dp.module(), reference, tolerance);
    sgd_step(dp.module());
    sgd_step(reference);
  }
}

TEST(DataParallelTest, EqualsTheWholeBatch) {
  for (const size_t devices : {1, 2, 3}) {
    SCOPED_TRACE(devices);
    const auto reference = make_net<PlainNet>();
    DataParallel<SyncNet> dp(make_net<SyncNet>(), on_cpus(devices));
    // Batches that divide evenly or unevenly, with as many samples as devices or fewer.
    expect_whole_batch(dp, *reference, {6, 8, 7, 3, 2, 1, 6});
  }
}

TEST(DataParallelTest, LayersMayBeConvertedBeforeAndAfter) {
  for (const bool before : {true, false}) {
    SCOPED_TRACE(before);
    const auto reference = make_net<PlainNet>();
    const auto net = make_net<PlainNet>();
    if (before) dist::convert_sync_batchnorm(*net);
    DataParallel<PlainNet> dp(net, on_cpus(3));
    if (!before) {
      dp(at::randn({6, 3, 8, 8}, at::kDouble));  // this step updates the statistics
      dist::convert_sync_batchnorm(*net);
      for (const auto& [name, buffer] : net->named_buffers().pairs()) {
        reference->named_buffers()[name].copy_(buffer);
      }
    }
    expect_whole_batch(dp, *reference, {6, 7, 2, 6});
    dist::revert_sync_batchnorm(*net);
    const at::Tensor images = at::randn({6, 3, 8, 8}, at::kDouble);
    Tensors apart;
    for (const at::Tensor& part : images.chunk(3)) apart.push_back(reference->forward(part));
    EXPECT_TRUE(close(dp(images), at::cat(apart), 1e-12, 1e-12));
  }
}

TEST(DataParallelTest, ReplicasOfConvertedLayersTakeOneValuePerChannel) {
  const auto make = [] {
    at::manual_seed(1);
    nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
    net->to(at::kDouble);
    return net;
  };
  nn::Sequential net = make();
  nn::Sequential reference = make();
  EXPECT_TRUE(dist::convert_sync_batchnorm(*net).refuse_one_value.empty());
  DataParallel<nn::SequentialImpl> dp(net, on_cpus(3));
  for (const int64_t samples : {3, 2, 4}) {
    const at::Tensor batch = at::randn({samples, 4}, at::kDouble);
    const at::Tensor scores = dp(batch);
    const at::Tensor expected = reference->forward(batch);
    EXPECT_TRUE(close(scores, expected, 1e-12, 1e-12));
    scores.pow(3).sum().backward();
    expected.pow(3).sum().backward();
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(
        close(item.value().grad(), reference->named_parameters()[item.key()].grad(), 1e-9, 1e-9));
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(close(item.value(), reference->named_buffers()[item.key()], 1e-12, 1e-12));
  }
  // The wrapper uses the layers that the module has at the time, and their mode.
  dist::revert_sync_batchnorm(*net);
  dp.eval();
  reference->eval();
  const at::Tensor batch = at::randn({3, 4}, at::kDouble);
  EXPECT_TRUE(close(dp(batch), reference->forward(batch), 1e-12, 1e-12));
}

// m = DataParallel(m); m = convert_model(m)
TEST(DataParallelTest, LayersConvertedBelowAWrapperTakeOneValuePerChannel) {
  nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4));
  DataParallel<nn::SequentialImpl> dp(net, on_cpus(2));
  EXPECT_TRUE(dist::convert_sync_batchnorm(*net).refuse_one_value.empty());
  for (const int64_t samples : {4, 2}) {
    EXPECT_TRUE(close(dp(at::randn({samples, 4})).mean(0), at::zeros({4}), 1e-5, 1e-5))
        << "of both replicas";
  }
  dp.eval();
  EXPECT_FALSE(close(dp(at::randn({4, 4})).mean(0), at::zeros({4}), 1e-5, 1e-5));
}

/// A block without clone(), with a buffer of its own that forward() changes.
template <class BatchNorm>
struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t channels) {
    conv = this->register_module("conv", nn::Conv2d(nn::Conv2dOptions(channels, channels, 1)));
    bn = this->register_module("bn", BatchNorm(channels));
    calls = this->register_buffer("calls", at::zeros({}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (this->is_training()) calls += 1;
    return x + bn->forward(conv(x)) * calls.item<double>();
  }
  nn::Conv2d conv{nullptr};
  BatchNorm bn{nullptr};
  at::Tensor calls;
};

/// A plain module: parts in a vector, in lambdas, in a Sequential and in plain blocks; a parameter
/// of its own; a constructor with arguments.
template <class BatchNorm>
struct PlainModuleImpl : nn::Module {
  PlainModuleImpl(int64_t channels, double slope) : slope_(slope) {
    nn::Conv2d stem(nn::Conv2dOptions(3, channels, 3));
    this->register_module("stem", stem);
    steps.emplace_back([stem](const at::Tensor& x) mutable { return stem(x); });
    chain = this->register_module(
        "chain", nn::Sequential(nn::Conv2d(channels, channels, 1), BatchNorm(channels)));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(this->register_module("block" + std::to_string(i),
                                             std::make_shared<BlockImpl<BatchNorm>>(channels)));
    }
    scale = this->register_parameter("scale", at::full({channels, 1, 1}, 0.5));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& step : steps) x = step(x);
    x = at::relu(chain->forward(x)) * slope_;
    for (const auto& block : blocks) x = block->forward(x);
    return at::cat({x * scale, x}, 1).mean({2, 3});
  }
  double slope_;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps;
  nn::Sequential chain{nullptr};
  std::vector<std::shared_ptr<BlockImpl<BatchNorm>>> blocks;
  at::Tensor scale;
};

template <class BatchNorm>
std::shared_ptr<PlainModuleImpl<BatchNorm>> plain_module() {
  at::manual_seed(1);
  const auto net = std::make_shared<PlainModuleImpl<BatchNorm>>(5, 0.7);
  net->to(at::kDouble);
  return net;
}

template <class Net, class Reference>
void expect_trains_as(DataParallel<Net>& dp, Reference& reference,
                      const std::vector<int64_t>& batches) {
  for (const int64_t samples : batches) {
    SCOPED_TRACE(samples);
    const at::Tensor images = at::randn({samples, 3, 6, 6}, at::kDouble);
    const at::Tensor output = dp(images);
    const at::Tensor expected = reference.forward(images);
    EXPECT_TRUE(close(output, expected, 1e-12, 1e-12));
    output.pow(3).mean().backward();
    expected.pow(3).mean().backward();
    expect_same_state(dp.module(), reference, 1e-11);
    sgd_step(dp.module());
    sgd_step(reference);
  }
}

TEST(DataParallelTest, ModulesWithoutCloneEqualTheWholeBatch) {
  const auto reference = plain_module<nn::BatchNorm2d>();
  DataParallel sync(plain_module<dist::SyncBatchNorm>(), on_cpus(3));
  expect_trains_as(sync, *reference, {6, 7, 2, 1, 6});
  for (const bool before : {true, false}) {
    SCOPED_TRACE(before);
    const auto whole = plain_module<nn::BatchNorm2d>();
    const auto net = plain_module<nn::BatchNorm2d>();
    if (before) dist::convert_sync_batchnorm(*net);
    DataParallel dp(net, on_cpus(2));
    if (!before) dist::convert_sync_batchnorm(*net);
    expect_trains_as(dp, *whole, {4, 5, 1, 4});
    dp.eval();
    whole->eval();
    const at::Tensor images = at::randn({3, 3, 6, 6}, at::kDouble);
    EXPECT_TRUE(close(dp(images), whole->forward(images), 1e-12, 1e-12));
    dist::revert_sync_batchnorm(*net);
  }
}

TEST(DataParallelTest, ReplicasOfAModuleWithoutCloneHaveBuffersOfTheirOwn) {
  const auto net = plain_module<nn::BatchNorm2d>();
  const auto first = plain_module<nn::BatchNorm2d>();
  const auto second = plain_module<nn::BatchNorm2d>();
  DataParallel dp(net, on_cpus(2));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor images = at::randn({6, 3, 6, 6}, at::kDouble);
    for (const auto& [name, buffer] : first->named_buffers().pairs()) {
      second->named_buffers()[name].set_data(buffer.clone());
    }
    const auto halves = images.chunk(2);
    const at::Tensor expected = at::cat({first->forward(halves[0]), second->forward(halves[1])});
    EXPECT_TRUE(close(dp(images), expected, 1e-12, 1e-12));
    for (const auto& [name, buffer] : first->named_buffers().pairs()) {
      EXPECT_TRUE(close(net->named_buffers()[name], buffer, 1e-12, 1e-12)) << name;
    }
  }
}

TEST(DataParallelTest, FollowsWhatHappensToAModuleWithoutClone) {
  const auto reference = plain_module<nn::BatchNorm2d>();
  const auto net = plain_module<dist::SyncBatchNorm>();
  DataParallel dp(net, on_cpus(2));
  for (nn::Module* module : std::initializer_list<nn::Module*>{net.get(), reference.get()}) {
    module->named_parameters()["stem.weight"].set_requires_grad(false);
  }
  expect_trains_as(dp, *reference, {4});
  for (nn::Module* module : std::initializer_list<nn::Module*>{net.get(), reference.get()}) {
    module->named_parameters()["stem.weight"].set_requires_grad(true);
    module->to(at::kFloat);
    module->to(at::kDouble);
  }
  expect_trains_as(dp, *reference, {4, 5});
}

struct OneNormImpl : nn::Module {
  explicit OneNormImpl(bool has_running_stats) {
    bn = register_module(
        "bn", nn::BatchNorm1d(nn::BatchNormOptions(3).track_running_stats(has_running_stats)));
  }
  at::Tensor forward(const at::Tensor& x) { return bn(x); }
  nn::BatchNorm1d bn{nullptr};
};

// The options of a layer, which all threads read, stay as they are.
TEST(DataParallelTest, ModulesWithoutCloneAndRunningStatisticsRefuseOneValuePerChannel) {
  for (const bool has_running_stats : {true, false}) {
    const auto net = std::make_shared<OneNormImpl>(has_running_stats);
    DataParallel dp(net, on_cpus(2));
    dist::convert_sync_batchnorm(*net);
    EXPECT_TRUE(close(dp(at::randn({4, 3})).mean(0), at::zeros({3}), 1e-5, 1e-5));
    const auto forward = [&] { dp(at::randn({2, 3})); };
    if (has_running_stats) {
      EXPECT_NO_THROW(forward());
    } else {
      EXPECT_THAT(message_of<ReplicaError>(forward), HasSubstr("Expected more than 1 value"));
    }
    EXPECT_EQ(net->bn->options.track_running_stats(), has_running_stats);
  }
}

/// Classes without a clone() of their own: it returns their base class.
struct ScaledChainImpl : nn::SequentialImpl {
  using nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return nn::SequentialImpl::forward(x) * scale; }
  double scale = 2;
};
struct ScaledNormImpl : dist::BatchNorm1dImpl {
  using dist::BatchNorm1dImpl::BatchNorm1dImpl;
  at::Tensor forward(const at::Tensor& x) { return dist::BatchNorm1dImpl::forward(x) * scale; }
  double scale = 3;
};
TORCH_MODULE(ScaledNorm);

TEST(DataParallelTest, ModulesWhoseCloneIsOfAnotherClassRunInAllThreads) {
  const auto expect_runs = [](const auto& net) {
    net->to(at::kDouble);
    net->eval();
    DataParallel dp(net, on_cpus(2));
    const at::Tensor batch = at::randn({4, 3}, at::kDouble);
    EXPECT_TRUE(close(dp(batch), net->forward(batch), 1e-12, 1e-12));
  };
  expect_runs(std::make_shared<ScaledChainImpl>(nn::Linear(3, 3)));
  expect_runs(std::make_shared<ScaledNormImpl>(3));
  expect_runs(nn::Sequential(nn::Linear(3, 3), ScaledNorm(3)).ptr());
}

struct FailingCloneImpl : nn::Module {
  explicit FailingCloneImpl(std::function<void()> fail) : fail(std::move(fail)) {}
  std::shared_ptr<nn::Module> clone(const std::optional<at::Device>&) const override {
    fail();
    return nullptr;
  }
  at::Tensor forward(const at::Tensor& x) { return x + 1; }
  std::function<void()> fail;
};

TEST(DataParallelTest, OnlyARefusalToCloneMeansThatThereIsNoClone) {
  const auto make = [](const std::function<void()>& fail) {
    DataParallel dp(std::make_shared<FailingCloneImpl>(fail), on_cpus(2));
    EXPECT_TRUE(dp(at::zeros({2})).equal(at::ones({2})));
  };
  make([] {});
  make([] { TORCH_CHECK(false, "no clone()"); });
  make([] { throw UserError("layers were added"); });
  EXPECT_THROW(make([] { throw std::bad_alloc(); }), std::bad_alloc);
  EXPECT_THROW(make([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory"); }),
               c10::OutOfMemoryError);
}

// On CPUs the tensors of replicas share the module's memory, unless a test makes them.
TEST(DataParallelTest, OperatorsGetTheReplicasTensorsInPlaceOfTheModules) {
  const DataParallel defines_the_key(std::make_shared<OneNormImpl>(true), on_cpus(2));
  at::Tensor module = at::zeros({2}, at::kLong);
  const at::Tensor own = at::ones({2}, at::kLong);
  const auto filled = [](const std::vector<int64_t>& sizes, int64_t value) {
    return at::full(sizes, value, at::kLong);
  };
  dist::detail::ReplicaTensors tensors;
  tensors.copies[module.unsafeGetTensorImpl()] = own;
  dist::detail::ReplicaTeam team(2, std::chrono::seconds(1));
  const auto in_replica = [&](const std::function<at::Tensor()>& body) {
    const dist::detail::ReplicaScope scope(team, 1, tensors, nullptr);
    return body();
  };
  EXPECT_TRUE(in_replica([&] { return at::cat({module, module}); }).equal(filled({4}, 1)));
  const at::Tensor table = at::arange(4).view({2, 2});
  const auto column = in_replica([&] {
    return at::index(table, c10::List<std::optional<at::Tensor>>({std::nullopt, module}));
  });
  EXPECT_TRUE(column.equal(at::cat({filled({1, 2}, 1), filled({1, 2}, 3)})));
  const at::Tensor changed = in_replica([&] { return module.add_(1); });
  EXPECT_TRUE(changed.is_same(module));
  EXPECT_TRUE(own.equal(filled({2}, 2)));
  const at::Tensor view = in_replica([&] { return module.view({2, 1}); });
  view.fill_(7);
  EXPECT_TRUE(own.equal(filled({2}, 7)));
  in_replica([&] { return at::add_out(module, table[0], table[0]); });
  EXPECT_TRUE(own.equal(table[0] * 2));
  EXPECT_TRUE(module.equal(filled({2}, 0))) << "the module's own stays";
}

TEST(DataParallelTest, GradientsOfGradientsAreThoseOfTheWholeBatch) {
  const auto reference = make_net<PlainNet>();
  const auto net = make_net<SyncNet>();
  DataParallel<SyncNet> dp(net, on_cpus(3));
  const at::Tensor images = at::randn({7, 3, 8, 8}, at::kDouble);
  const auto penalty = [&](const auto& forward, const at::Tensor& input) {
    const at::Tensor loss = forward(input).pow(3).sum();
    const auto gradient = torch::autograd::grad({loss}, {input}, {}, true, /*create_graph=*/true);
    gradient[0].pow(2).sum().backward();
  };
  const at::Tensor own = images.clone().requires_grad_();
  const at::Tensor whole = images.clone().requires_grad_();
  penalty([&](const at::Tensor& x) { return dp(x); }, own);
  penalty([&](const at::Tensor& x) { return reference->forward(x); }, whole);
  EXPECT_TRUE(close(own.grad(), whole.grad(), 1e-10, 1e-10));
  expect_same_state(*net, *reference, 1e-10);
}

/// A block of a ResNet with two paths; only the layers' numbers determine the order of their
/// backward.
template <class BatchNorm>
struct BranchesNetImpl : nn::Cloneable<BranchesNetImpl<BatchNorm>> {
  BranchesNetImpl() { reset(); }
  void reset() override {
    for (size_t i = 0; i < 3; ++i) {
      const auto name = [&](const char* what) { return what + std::to_string(i); };
      conv[i] = this->register_module(name("conv"), nn::Conv2d(3, 3, 1));
      bn[i] = this->register_module(name("bn"), BatchNorm(3));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor left = bn[1]->forward(conv[1](at::relu(bn[0]->forward(conv[0](x)))));
    return (left + bn[2]->forward(conv[2](x))).relu();
  }
  nn::Conv2d conv[3] = {nullptr, nullptr, nullptr};
  BatchNorm bn[3] = {nullptr, nullptr, nullptr};
};

TEST(DataParallelTest, LayersOfBranchesRunInTheSameOrderOnAllRanks) {
  run_group(2, [](int rank) {
    const auto reference = make_net<BranchesNetImpl<nn::BatchNorm2d>>();
    using Net = BranchesNetImpl<dist::SyncBatchNorm>;
    const auto net = make_net<Net>();
    DataParallel<Net> dp(net, on_cpus(3));
    dist::DistributedDataParallel<Net> ddp(net, {.broadcast_buffers = false});
    for (int step = 0; step < 60; ++step) {
      // Sometimes fewer images than replicas, and different numbers on the two ranks.
      const int64_t sizes[2] = {1 + step % 5, 1 + step / 2 % 4};
      at::manual_seed(static_cast<uint64_t>(step));
      const at::Tensor images = at::randn({sizes[0] + sizes[1], 3, 4, 4}, at::kDouble);
      const at::Tensor own = images.narrow(0, rank * sizes[0], sizes[rank]);
      const at::Tensor output =
          ddp.invoke([&](Net&, const at::Tensor& part) { return dp(part); }, own);
      (output.pow(2).sum() * 2).backward();
      reference->forward(images).pow(2).sum().backward();
      expect_same_state(*net, *reference, 1e-10);
      sgd_step(*net);
      sgd_step(*reference);
    }
  });
}

TEST(DataParallelTest, GraphsOutliveForwardsAndRunTwice) {
  const auto reference = make_net<PlainNet>();
  const auto net = make_net<SyncNet>();
  DataParallel<SyncNet> dp(net, on_cpus(2));
  const at::Tensor first = at::randn({5, 3, 8, 8}, at::kDouble);
  const at::Tensor second = at::randn({4, 3, 8, 8}, at::kDouble);
  const at::Tensor loss = dp(first).pow(3).sum();
  const at::Tensor expected = reference->forward(first).pow(3).sum();
  {
    const at::NoGradGuard no_grad;
    dp(second);
    reference->forward(second);
  }
  const at::Tensor other = dp(second).pow(3).sum();
  const at::Tensor expected_other = reference->forward(second).pow(3).sum();
  for (const at::Tensor& one : {loss, expected, loss, expected}) {
    one.backward({}, /*retain_graph=*/true);
  }
  other.backward();
  expected_other.backward();
  expect_same_state(*net, *reference, 1e-11);
  EXPECT_THAT(message_of<std::exception>([&] { other.backward(); }), HasSubstr("second time"));
}

TEST(DataParallelTest, SharedOptionsOfLayersHold) {
  using Options = dist::SyncBatchNormOptions;
  for (const Options& options : {Options(3).affine(false), Options(3).track_running_stats(false),
                                 Options(3).momentum(std::nullopt), Options(3).fuse_relu(true),
                                 Options(3).affine(false).track_running_stats(false)}) {
    nn::Sequential sync(nn::Linear(4, 3), dist::SyncBatchNorm(options), nn::Linear(3, 2));
    sync->to(at::kDouble);
    nn::Sequential plain(nn::Linear(4, 3),
                         nn::BatchNorm1d(nn::BatchNorm1dOptions(3)
                                             .affine(options.affine())
                                             .track_running_stats(options.track_running_stats())
                                             .momentum(options.momentum())),
                         nn::Linear(3, 2));
    plain->to(at::kDouble);
    const auto parameters = sync->named_parameters();
    const at::NoGradGuard no_grad_to_copy;
    for (auto& item : plain->named_parameters()) item.value().copy_(parameters[item.key()]);
    const at::AutoGradMode grad(true);
    DataParallel<nn::SequentialImpl> dp(sync, on_cpus(3));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor input = at::randn({7, 4}, at::kDouble);
      const at::Tensor output = dp.invoke(
          [](nn::SequentialImpl& net, const at::Tensor& x) { return net.forward<at::Tensor>(x); },
          input);
      at::Tensor x = plain[0]->as<nn::Linear>()->forward(input);
      x = plain[1]->as<nn::BatchNorm1d>()->forward(x);
      if (options.fuse_relu()) x = at::relu(x);
      x = plain[2]->as<nn::Linear>()->forward(x);
      EXPECT_TRUE(close(output, x, 1e-12, 1e-12));
      output.pow(3).sum().backward();
      x.pow(3).sum().backward();
    }
    expect_same_state(*sync, *plain, 1e-11);
  }
}

/// A layer that applies ReLU and adds its input in one pass.
struct ResidualNetImpl : nn::Cloneable<ResidualNetImpl> {
  ResidualNetImpl() { reset(); }
  void reset() override {
    fc = register_module("fc", nn::Linear(3, 3));
    bn = register_module("bn", dist::SyncBatchNorm(dist::SyncBatchNormOptions(3).fuse_relu(true)));
  }
  at::Tensor forward(const at::Tensor& x) { return bn->forward(fc(x), x); }
  nn::Linear fc{nullptr};
  dist::SyncBatchNorm bn{nullptr};
};

TEST(DataParallelTest, AdditionsInALayerAreOfEachReplica) {
  const auto net = make_net<ResidualNetImpl>();
  const auto reference = make_net<ResidualNetImpl>();
  DataParallel<ResidualNetImpl> dp(net, on_cpus(3));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor input = at::randn({7, 3}, at::kDouble);
    const at::Tensor own = input.clone().requires_grad_();
    const at::Tensor whole = input.clone().requires_grad_();
    const at::Tensor output = dp(own);
    const at::Tensor expected = reference->forward(whole);
    EXPECT_TRUE(close(output, expected, 1e-12, 1e-12));
    output.pow(3).sum().backward();
    expected.pow(3).sum().backward();
    EXPECT_TRUE(close(own.grad(), whole.grad(), 1e-12, 1e-12));
    expect_same_state(*net, *reference, 1e-12);
  }
}

TEST(DataParallelTest, AverageStatisticsAreThoseOfTheWholeBatch) {
  const auto reference = make_net<PlainNet>();
  const auto net = make_net<SyncNet>();
  DataParallel<SyncNet> dp(net, on_cpus(2));
  Tensors batches;
  for (int i = 0; i < 3; ++i) batches.push_back(at::randn({6, 3, 8, 8}, at::kDouble));
  dist::update_bn_stats(
      *net, [&](int64_t i) { dp(batches[static_cast<size_t>(i)]); }, 3);
  dist::update_bn_stats(
      *reference, [&](int64_t i) { reference->forward(batches[static_cast<size_t>(i)]); }, 3);
  expect_same_state(*net, *reference, 1e-12);
}

TEST(DataParallelTest, CheckpointingIsRefused) {
  DataParallel<SyncNet> dp(make_net<SyncNet>(), on_cpus(2));
  const at::Tensor images = at::randn({4, 3, 8, 8}, at::kDouble).requires_grad_();
  EXPECT_THAT(message_of<UserError>(
                  [&] { dist::checkpoint([&](const at::Tensor& x) { return dp(x); }, images); }),
              HasSubstr("checkpoint() around it"));
  EXPECT_THAT(message_of<ReplicaError>([&] {
                dp.invoke(
                    [](SyncNet& net, const at::Tensor& x) {
                      return dist::checkpoint([&](const at::Tensor& y) { return net.forward(y); },
                                              x);
                    },
                    images);
              }),
              HasSubstr("checkpoint() inside DataParallel"));
}

TEST(DataParallelTest, PlainBatchNormIsOfEachReplica) {
  const auto net = make_net<PlainNet>();
  const auto apart = make_net<PlainNet>();
  DataParallel<PlainNet> dp(net, on_cpus(2));
  const at::Tensor images = at::randn({6, 3, 8, 8}, at::kDouble);
  const at::Tensor output = dp(images);
  const at::Tensor first = apart->forward(images.narrow(0, 0, 3));
  expect_same_state(*net, *apart, 1e-12);  // the buffers are those of the first replica
  const at::Tensor second = apart->forward(images.narrow(0, 3, 3));
  EXPECT_TRUE(close(output, at::cat({first, second}), 1e-12, 1e-12));
}

TEST(DataParallelTest, EvaluationUsesTheModulesBuffers) {
  const auto net = make_net<SyncNet>();
  DataParallel<SyncNet> dp(net, on_cpus(3));
  const at::Tensor images = at::randn({6, 3, 8, 8}, at::kDouble);
  for (int step = 0; step < 3; ++step) dp(images);
  dp.eval();
  const at::Tensor expected = net->forward(images);
  EXPECT_TRUE(close(dp(images), expected, 1e-12, 1e-12));
  {
    const at::NoGradGuard no_grad;
    net->bn1->running_mean.add_(1);
    net->conv1->weight.mul_(2);
  }
  EXPECT_TRUE(close(dp(images), net->forward(images), 1e-12, 1e-12));
  // New values, as from a file of weights.
  for (const auto& item : net->named_buffers()) item.value().set_data(item.value() * 2 + 1);
  EXPECT_TRUE(close(dp(images), net->forward(images), 1e-12, 1e-12));
  // Parts of the network in another mode.
  dp.train();
  net->bn1->eval();
  net->bn2->eval();
  EXPECT_TRUE(close(dp(images), net->forward(images), 1e-12, 1e-12));
}

TEST(DataParallelTest, FollowsWhatHappensToTheModule) {
  const auto reference = make_net<PlainNet>();
  const auto net = make_net<SyncNet>();
  DataParallel<SyncNet> dp(net, on_cpus(2));
  for (nn::Module* module : std::initializer_list<nn::Module*>{net.get(), reference.get()}) {
    module->named_parameters()["conv1.weight"].set_requires_grad(false);
  }
  expect_whole_batch(dp, *reference, {4});
  for (nn::Module* module : std::initializer_list<nn::Module*>{net.get(), reference.get()}) {
    module->named_parameters()["conv1.weight"].set_requires_grad(true);
    module->to(at::kFloat);
    module->to(at::kDouble);
  }
  expect_whole_batch(dp, *reference, {4, 5});
}

TEST(DataParallelTest, MakingOneLeavesTheRandomNumbersAlone) {
  const auto net = make_net<SyncNet>();
  at::manual_seed(3);
  const at::Tensor expected = at::randn({4});
  at::manual_seed(3);
  const DataParallel<SyncNet> dp(net, on_cpus(3));
  EXPECT_TRUE(at::randn({4}).equal(expected));
}

struct Input {
  at::Tensor images;
  std::map<std::string, at::Tensor> extra;
  double factor = 1;

  template <class Visit>
  void for_each_tensor(const Visit& visit) {
    visit(images);
    visit(extra);
  }
};
struct Result {
  std::vector<at::Tensor> parts;
  at::Tensor loss;
  std::string text;

  template <class Visit>
  void for_each_tensor(const Visit& visit) {
    visit(parts);
    visit(loss);
  }
};

struct TreeNetImpl : nn::Cloneable<TreeNetImpl> {
  TreeNetImpl() { reset(); }
  void reset() override { fc = register_module("fc", nn::Linear(2, 2)); }
  Result forward(const Input& input, const at::Tensor& scale, std::vector<int>& seen) {
    seen.push_back(static_cast<int>(input.images.size(0)));
    const at::Tensor output = fc(input.images) * input.factor * scale;
    return {{output, input.extra.at("more") + 1}, output.sum(), "replica"};
  }
  nn::Linear fc{nullptr};
};

TEST(DataParallelTest, DividesStructsAndContainersAndPutsThemTogether) {
  const auto net = std::make_shared<TreeNetImpl>();
  DataParallel<TreeNetImpl> dp(net, on_cpus(2));
  const Input input{at::randn({5, 2}), {{"more", at::randn({5, 1})}}, 2};
  const Result result = dp(input, at::full({}, 3.0), std::vector<int>{});
  ASSERT_EQ(result.parts.size(), 2);
  EXPECT_TRUE(close(result.parts[0], net->fc(input.images) * 6, 1e-6, 1e-6));
  EXPECT_TRUE(result.parts[1].equal(input.extra.at("more") + 1));
  EXPECT_EQ(result.loss.sizes(), at::IntArrayRef({2}));
  EXPECT_TRUE(close(result.loss.sum(), (net->fc(input.images) * 6).sum(), 1e-5, 1e-5));
  EXPECT_EQ(result.text, "replica");
  const auto other = dp.invoke(
      [](TreeNetImpl& module, const at::Tensor& x) { return module.fc(x); }, input.images);
  EXPECT_TRUE(close(other, net->fc(input.images), 1e-6, 1e-6));
}

struct FailingImpl : nn::Cloneable<FailingImpl> {
  FailingImpl() { reset(); }
  void reset() override { bn = register_module("bn", dist::SyncBatchNorm(2)); }
  at::Tensor forward(const at::Tensor& x, const std::function<void(double)>& before,
                     const std::function<bool(double)>& runs_layer) {
    const double first = x[0][0].item<double>();
    before(first);
    return runs_layer(first) ? bn(x) : x;
  }
  dist::SyncBatchNorm bn{nullptr};
};

/// The values of replica i are i.
at::Tensor numbered(int64_t replicas) {
  return at::arange(replicas, at::kDouble)
      .to(at::kFloat)
      .repeat_interleave(2)
      .view({-1, 1})
      .repeat({1, 2});
}

TEST(DataParallelTest, AFailureOfAReplicaIsItsOwn) {
  DataParallel<FailingImpl> dp(std::make_shared<FailingImpl>(), on_cpus(3));
  const std::function<bool(double)> yes = [](double) { return true; };
  const std::function<void(double)> fails = [](double replica) {
    if (replica == 1) throw UserError("no such thing");
  };
  try {
    dp(numbered(3), fails, yes);
    FAIL();
  } catch (const ReplicaError& error) {
    EXPECT_EQ(error.replica(), 1);
    EXPECT_EQ(error.exit_code(), syncbn::base::kExitUsage);
    EXPECT_STREQ(error.what(), "DataParallel: replica 1 on cpu failed: no such thing");
  }
  const std::function<void(double)> nothing = [](double) {};
  EXPECT_EQ(dp(numbered(3), nothing, yes).sizes(), at::IntArrayRef({6, 2}));
}

TEST(DataParallelTest, AReplicaThatDoesNotComeToALayerIsNamed) {
  DataParallelOptions options = on_cpus(3);
  options.sync_timeout = std::chrono::seconds(1);
  DataParallel<FailingImpl> dp(std::make_shared<FailingImpl>(), options);
  const std::function<void(double)> nothing = [](double) {};
  const std::function<bool(double)> not_1 = [](double replica) { return replica != 1; };
  try {
    dp(numbered(3), nothing, not_1);
    FAIL();
  } catch (const ReplicaError& error) {
    EXPECT_EQ(error.replica(), 1);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("DataParallel: SyncBatchNorm: the replicas are in"),
                                    HasSubstr("replica 1 has returned")));
  }
  const std::function<bool(double)> yes = [](double) { return true; };
  const std::function<void(double)> sleeps = [](double replica) {
    // Longer than the timeout.
    if (replica == 2) std::this_thread::sleep_for(std::chrono::seconds(3));
  };
  EXPECT_THAT(message_of<ReplicaError>([&] { dp(numbered(3), sleeps, yes); }),
              AllOf(HasSubstr("replica 2 did not arrive at layer 'bn' within 1 s"),
                    HasSubstr("sync_timeout")));
}

// Where Synchronized-BatchNormalization's README writes it.
TEST(DataParallelTest, TheSyncTimeoutOfALayerHoldsIfItIsSmaller) {
  const auto error = [](std::chrono::milliseconds of_layer, std::chrono::milliseconds of_wrapper,
                        bool converted) {
    nn::Sequential net;
    if (converted) {
      net->push_back(nn::BatchNorm1d(2));
      dist::convert_sync_batchnorm(*net, {}, of_layer);
    } else {
      net->push_back(dist::SyncBatchNorm(dist::SyncBatchNormOptions(2).sync_timeout(of_layer)));
    }
    DataParallelOptions options = on_cpus(2);
    options.sync_timeout = of_wrapper;
    DataParallel<nn::SequentialImpl> dp(net, options);
    const auto sleeps = [](nn::SequentialImpl& module, const at::Tensor& x) {
      if (dist::replica_place().replica == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
      return module.forward(x);
    };
    return message_of<ReplicaError>([&] { dp.invoke(sleeps, at::randn({4, 2})); });
  };
  using namespace std::chrono_literals;
  for (const bool converted : {false, true}) {
    EXPECT_THAT(error(300ms, 60s, converted), HasSubstr("replica 1 did not arrive at layer '0' "
                                                        "within 0.3 s; raise sync_timeout"));
    EXPECT_THAT(error(60s, 300ms, converted), HasSubstr("within 0.3 s"));
  }
}

TEST(DataParallelTest, WhatIsThrownMayBeAnything) {
  DataParallel<FailingImpl> dp(std::make_shared<FailingImpl>(), on_cpus(2));
  const std::function<void(double)> throws = [](double) { throw 42; };
  const std::function<bool(double)> yes = [](double) { return true; };
  EXPECT_THAT(message_of<ReplicaError>([&] { dp(numbered(2), throws, yes); }),
              HasSubstr("not a std::exception"));
}

TEST(DataParallelTest, ItIsUsedByOneThreadAtATimeAndInItsProcess) {
  const auto net = make_net<PlainNet>();
  auto own = std::make_unique<DataParallel<PlainNet>>(
      net, DataParallelOptions{.device_ids = {at::kCPU, at::kCPU},
                               .sync_timeout = std::chrono::milliseconds::max()});
  auto& dp = *own;
  const at::Tensor images = at::randn({4, 3, 8, 8}, at::kDouble);
  EXPECT_THAT(message_of<ReplicaError>([&] {
                dp.invoke([&](PlainNet&, const at::Tensor& own) { return dp(own); }, images);
              }),
              HasSubstr("DataParallel was called by two threads at once, or from inside itself"));
  EXPECT_EQ(dp(images).size(0), 4);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string why = message_of<UserError>([&] { dp(images); });
    own.reset();
    ::_exit(why.find("was forked from it") != std::string::npos ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(DataParallelTest, MapsAreMatchedByTheirKeys) {
  const auto net = make_net<PlainNet>();
  DataParallel<PlainNet> dp(net, on_cpus(2));
  const at::Tensor numbers = at::arange(4, at::kDouble);
  const auto message = [&](const auto& make) {
    return message_of<UserError>(
        [&] { dp.invoke([&](PlainNet&, const at::Tensor& own) { return make(own); }, numbers); });
  };
  const auto is_first = [](const at::Tensor& own) { return own[0].item<double>() == 0; };
  EXPECT_THAT(message([&](const at::Tensor& own) {
                return std::map<std::string, at::Tensor>{{is_first(own) ? "a" : "b", own}};
              }),
              HasSubstr("the keys of maps are a in replica 0, b in replica 1"));
  EXPECT_THAT(message([&](const at::Tensor& own) {
                return std::map<int, at::Tensor>{{is_first(own) ? 1 : 2, own}, {3, own}};
              }),
              HasSubstr("1, 3 in replica 0, 2, 3 in replica 1"));
  const auto output = dp.invoke(
      [](PlainNet&, const at::Tensor& own, const char* name) {
        return std::map<std::string, at::Tensor>{{name, own}};
      },
      numbers, "same");
  EXPECT_TRUE(output.at("same").equal(numbers));
}

TEST(DataParallelTest, AReplicaFindsItsPartOfWhatIsNotDivided) {
  const auto net = make_net<PlainNet>();
  EXPECT_EQ(dist::replica_place().replicas, 1);
  for (const int64_t samples : {1, 2, 7}) {
    DataParallel<PlainNet> dp(net, on_cpus(3));
    const at::Tensor whole = at::randn({samples, 2});
    const at::Tensor found = dp.invoke(
        [&](PlainNet&, const at::Tensor& own) {
          const auto [replica, replicas] = dist::replica_place();
          const at::Tensor part = whole.tensor_split(replicas)[static_cast<size_t>(replica)];
          EXPECT_TRUE(part.equal(own));
          return part;
        },
        whole);
    EXPECT_TRUE(found.equal(whole));
  }
}

struct TwoLayersImpl : nn::Cloneable<TwoLayersImpl> {
  TwoLayersImpl() { reset(); }
  void reset() override {
    left = register_module("left", dist::SyncBatchNorm(2));
    right = register_module("right", dist::SyncBatchNorm(2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x[0][0].item<double>() == 1 ? right(x) : left(x);
  }
  dist::SyncBatchNorm left{nullptr}, right{nullptr};
};

TEST(DataParallelTest, ReplicasInDifferentLayersAreNamed) {
  DataParallel<TwoLayersImpl> dp(std::make_shared<TwoLayersImpl>(), on_cpus(2));
  EXPECT_THAT(message_of<ReplicaError>([&] { dp(numbered(2)); }),
              HasSubstr("replica 0 is in layer 'left', replica 1 is in layer 'right'"));
}

TEST(DataParallelTest, WhatDoesNotFitIsRefused) {
  struct NotCloneable : nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  const std::vector<std::shared_ptr<NotCloneable>> two{std::make_shared<NotCloneable>(),
                                                       std::make_shared<NotCloneable>()};
  DataParallel<NotCloneable> given(two, on_cpus(2));
  EXPECT_EQ(given(at::ones({4, 2})).sizes(), at::IntArrayRef({4, 2}));
  EXPECT_THAT(message_of<UserError>([&] { DataParallel<NotCloneable>(two, on_cpus(3)); }),
              HasSubstr("2 replicas are given for 3 devices"));
  EXPECT_THAT(message_of<UserError>([] { DataParallel<SyncNet>(std::shared_ptr<SyncNet>()); }),
              HasSubstr("the module is null"));
  const auto message = [](DataParallelOptions options) {
    return message_of<UserError>([&] { DataParallel<SyncNet>(make_net<SyncNet>(), options); });
  };
  const auto one = std::make_shared<NotCloneable>();
  EXPECT_THAT(message_of<UserError>([&] {
                DataParallel<NotCloneable>(std::vector<std::shared_ptr<NotCloneable>>{one, one},
                                           on_cpus(2));
              }),
              HasSubstr("replica 1 is given twice"));
  const auto linears = [&](const nn::Linear& second) {
    nn::Linear first(2, 2);
    return message_of<UserError>([&] {
      DataParallel<nn::LinearImpl>(std::vector{first.ptr(), second.ptr()}, on_cpus(2));
    });
  };
  EXPECT_THAT(linears(nn::Linear(2, 3)), HasSubstr("replica 1 has a tensor of the shape [3, 2]"));
  EXPECT_THAT(message({.device_ids = {at::Device("cuda:99")}}),
              HasSubstr("there is no device cuda:99"));
  EXPECT_THAT(message({.device_ids = {at::kCPU, at::Device("cpu:1")}}),
              HasSubstr("there is no device cpu:1"));
  EXPECT_THAT(message({.sync_timeout = std::chrono::milliseconds(0)}),
              HasSubstr("sync_timeout must be above zero"));

  DataParallel<TreeNetImpl> dp(std::make_shared<TreeNetImpl>(), on_cpus(2));
  const auto identity = [](TreeNetImpl&, const at::Tensor& x, const at::Tensor& y) {
    return x.size(0) == 3 ? at::ones({2, 5}) : at::ones({2, 4}) + y.sum();
  };
  EXPECT_THAT(message_of<UserError>([&] { dp.invoke(identity, at::ones({5}), at::ones({4})); }),
              HasSubstr("inputs [5] and [4] differ in dimension 0"));
  EXPECT_THAT(message_of<UserError>([&] { dp.invoke(identity, at::ones({5}), at::ones({5})); }),
              HasSubstr("tensor 0 is [2, 5] of Float in replica 0, [2, 4] of Float in replica 1"));
}

TEST(DataParallelTest, OtherDimensionsAndBatchesWithoutSamples) {
  nn::Sequential net(nn::Linear(4, 3));
  DataParallelOptions options = on_cpus(2);
  options.dim = -2;
  DataParallel<nn::SequentialImpl> dp(net, options);
  const at::Tensor input = at::randn({2, 5, 4});
  const auto forward = [](nn::SequentialImpl& module, const at::Tensor& x) {
    return module.forward<at::Tensor>(x);
  };
  EXPECT_TRUE(close(dp.invoke(forward, input), net->forward(input), 1e-6, 1e-6));
  EXPECT_EQ(dp.invoke(forward, at::ones({2, 0, 4})).sizes(), at::IntArrayRef({2, 0, 3}));
}

TEST(DataParallelTest, AThousandStepsTakeNoMemory) {
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    int64_t total = 0, pages = 0;
    file >> total >> pages;
    return pages * 4096;
  };
  DataParallel<SyncNet> dp(make_net<SyncNet>(), on_cpus(2));
  const at::Tensor images = at::randn({4, 3, 8, 8}, at::kDouble);
  const auto steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      dp(images).pow(2).sum().backward();
      sgd_step(dp.module());
    }
  };
  steps(100);
  const int64_t before = resident();
  steps(1000);
  EXPECT_LT(resident() - before, int64_t{4} << 20);
}

TEST(DataParallelTest, ReplicasOfAllRanksShareStatisticsBelowDdp) {
  run_group(2, [](int rank) {
    const auto reference = make_net<PlainNet>();
    const auto net = make_net<SyncNet>();
    DataParallel<SyncNet> dp(net, on_cpus(2));
    dist::DistributedDataParallel<SyncNet> ddp(net, {.broadcast_buffers = false});
    for (const int64_t samples : {4, 5, 1}) {
      at::manual_seed(static_cast<uint64_t>(samples));
      const at::Tensor images = at::randn({2 * samples, 3, 8, 8}, at::kDouble);
      const at::Tensor output = ddp.invoke([&](SyncNet&, const at::Tensor& own) { return dp(own); },
                                           images.narrow(0, rank * samples, samples));
      const at::Tensor expected = reference->forward(images);
      EXPECT_TRUE(close(output, expected.narrow(0, rank * samples, samples), 1e-12, 1e-12));
      (output.pow(3).sum() * 2).backward();  // DDP averages over two ranks
      expected.pow(3).sum().backward();
      expect_same_state(*net, *reference, 1e-12);
      sgd_step(*net);
      sgd_step(*reference);
    }
  });
}

torch::jit::Module script_net() {
  torch::jit::Module layer("BatchNorm1d");
  layer.register_parameter("weight", at::ones({3}, at::kDouble).requires_grad_(), false);
  layer.register_parameter("bias", at::zeros({3}, at::kDouble).requires_grad_(), false);
  layer.register_buffer("running_mean", at::zeros({3}, at::kDouble));
  layer.register_buffer("running_var", at::ones({3}, at::kDouble));
  layer.register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  layer.register_attribute("training", c10::BoolType::get(), true);
  layer.define(R"(
    def forward(self, x: Tensor) -> Tensor:
      return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
                              self.training, 0.1, 1e-05, True)
  )");
  torch::jit::Module net("Net");
  net.register_module("bn", layer);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.define(R"(
    def forward(self, x: Tensor) -> Tuple[Tensor, List[Tensor]]:
      y = self.bn.forward(x)
      return y, [y.sum(), y * 2]
  )");
  std::stringstream file;
  net.save(file);
  return torch::jit::load(file);
}

TEST(DataParallelTest, TakesTorchScript) {
  for (const bool before : {true, false}) {
    SCOPED_TRACE(before);
    torch::jit::Module reference = script_net();
    torch::jit::Module net = script_net();
    if (before) dist::convert_sync_batchnorm(net);
    DataParallel<torch::jit::Module> dp(net, on_cpus(3));
    if (!before) dist::convert_sync_batchnorm(dp.module());
    const auto state = [](torch::jit::Module& module) {
      std::map<std::string, at::Tensor> all;
      for (const auto& item : module.named_parameters()) all["." + item.name] = item.value.grad();
      for (const auto& item : module.named_buffers()) all[item.name] = item.value;
      return all;
    };
    for (int step = 0; step < 4; ++step) {
      const at::Tensor input = at::randn({7, 3}, at::kDouble);
      const auto output = dp(input);
      const auto expected = reference.forward({input});
      const auto tensor = [](const c10::IValue& value) {
        return value.toTupleRef().elements()[0].toTensor();
      };
      EXPECT_TRUE(close(tensor(output), tensor(expected), 1e-12, 1e-12));
      const auto list = output.toTupleRef().elements()[1].toTensorVector();
      EXPECT_EQ(list[0].sizes(), at::IntArrayRef({3}));
      EXPECT_TRUE(close(list[1], 2 * tensor(expected), 1e-12, 1e-12));
      tensor(output).pow(3).sum().backward();
      tensor(expected).pow(3).sum().backward();
      const auto whole = state(reference);
      for (const auto& [name, value] : state(dp.module())) {
        EXPECT_TRUE(close(value, whole.at(name), 1e-12, 1e-12)) << name;
      }
    }
    dp.eval();
    reference.eval();
    const at::Tensor input = at::randn({7, 3}, at::kDouble);
    EXPECT_TRUE(close(dp(input).toTupleRef().elements()[0].toTensor(),
                      reference.forward({input}).toTupleRef().elements()[0].toTensor(), 1e-12,
                      1e-12));
  }
}

}  // namespace

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <sstream>

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using syncbn::test::close;
using syncbn::test::run_ranks;
using ::testing::ElementsAre;

constexpr int kLayers = 5;
constexpr int kSteps = 5;

/// Batch norm in a Sequential, in holders and in a container of a container.
struct NetImpl : nn::Module {
  NetImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 4, 3)));
    first = register_module("first", nn::BatchNorm2d(4));
    blocks = register_module("blocks", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(4, 4, 1)),
                                                      nn::BatchNorm2d(4), nn::ReLU()));
    list = register_module(
        "list",
        nn::ModuleList(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(4, 4, 1)), nn::BatchNorm2d(4))));
    last = register_module("last",
                           nn::BatchNorm1d(nn::BatchNorm1dOptions(4).track_running_stats(false)));
    cumulative = register_module("cumulative",
                                 nn::BatchNorm1d(nn::BatchNormOptions(4).momentum(std::nullopt)));
    linear = register_module("linear", nn::Linear(4, 2));
  }
  at::Tensor forward(at::Tensor x) {
    x = blocks->forward(first(conv(x)));
    x = list[0]->as<nn::SequentialImpl>()->forward(x);
    return linear(cumulative(last(x.mean({2, 3}))));
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d first{nullptr};
  nn::Sequential blocks{nullptr};
  nn::ModuleList list{nullptr};
  nn::BatchNorm1d last{nullptr};
  nn::BatchNorm1d cumulative{nullptr};
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Net);

void sgd_step(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    parameter.sub_(parameter.grad(), 0.05);
    parameter.mutable_grad() = at::Tensor();
  }
}

uint64_t exchanges() {
  return dist::detail::backend_of(dist::detail::statistics_group({}))->sequence();
}

/// Who averages gradients over ranks: DDP, or this test.
enum class Gradients { kAveraged, kLocal };

void average_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    dist::all_reduce(parameter.mutable_grad());
    parameter.mutable_grad().div_(dist::world_size());
  }
}

/// Trains on this rank's half of each batch and the reference on the whole, and compares.
template <class Forward, class ReferenceForward>
void expect_trains_as_whole_batch(Forward forward, const std::vector<at::Tensor>& parameters,
                                  ReferenceForward reference_forward,
                                  const std::vector<at::Tensor>& reference_parameters, int rank,
                                  Gradients gradients) {
  exchanges();  // makes the group
  at::manual_seed(11);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor batch = at::randn({8, 3, 6, 6});
    const at::Tensor target = at::randn({8, 2});
    const uint64_t before = exchanges();
    (forward(batch.narrow(0, int64_t{4} * rank, 4)) - target.narrow(0, int64_t{4} * rank, 4))
        .pow(2)
        .mean()
        .backward();
    EXPECT_EQ(exchanges() - before, 2u * kLayers) << "step " << step;
    (reference_forward(batch) - target).pow(2).mean().backward();
    if (gradients == Gradients::kLocal) average_gradients(parameters);
    sgd_step(parameters);
    sgd_step(reference_parameters);
    ASSERT_EQ(parameters.size(), reference_parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_TRUE(close(parameters[i], reference_parameters[i], 1e-4, 1e-5))
          << "parameter " << i << " after step " << step;
    }
  }
}

TEST(ConvertTest, NamesEveryLayerAndTrainsAsOnTheWholeBatch) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(0);
    Net net;
    at::manual_seed(0);
    Net reference;
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_THAT(report.converted,
                ElementsAre("first", "blocks.1", "list.0.1", "last", "cumulative"));
    EXPECT_TRUE(report.not_converted.empty());
    dist::DistributedDataParallel<NetImpl> ddp(net);
    expect_trains_as_whole_batch([&](const at::Tensor& x) { return ddp(x); }, net->parameters(),
                                 [&](const at::Tensor& x) { return reference->forward(x); },
                                 reference->parameters(), rank, Gradients::kAveraged);
    EXPECT_TRUE(close(net->first->running_var, reference->first->running_var));
    EXPECT_TRUE(close(net->cumulative->running_mean, reference->cumulative->running_mean));
  });
}

TEST(ConvertTest, AfterWarmUpAndToDoubleTheLayersAreStillConverted) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(0);
    Net net;
    net->forward(at::randn({4, 3, 6, 6})).sum().backward();
    dist::convert_sync_batchnorm(*net);
    net->to(at::kDouble);
    exchanges();
    const uint64_t before = exchanges();
    at::manual_seed(rank);
    net->forward(at::randn({4, 3, 6, 6}, at::kDouble));
    EXPECT_EQ(exchanges() - before, static_cast<uint64_t>(kLayers));
  });
}

TEST(ConvertTest, RevertAndEvaluationAndOtherModulesExchangeNothing) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net;
    Net other;
    dist::convert_sync_batchnorm(*net);
    exchanges();
    const uint64_t before = exchanges();
    const at::Tensor batch = at::randn({4, 3, 6, 6});
    other->forward(batch);
    net->eval();
    net->forward(batch);
    net->train();
    dist::revert_sync_batchnorm(*net);
    net->forward(batch);
    EXPECT_EQ(exchanges(), before);
  });
}

TEST(ConvertTest, TheRootItselfIsConverted) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    nn::BatchNorm1d layer(3);
    EXPECT_THAT(dist::convert_sync_batchnorm(*layer).converted, ElementsAre(""));
    const at::Tensor batch = at::randn({6, 3});
    at::Tensor sum = batch.sum(0);
    dist::all_reduce(sum);
    layer(batch);
    EXPECT_TRUE(close(layer->running_mean, sum / 12 * 0.1));
    EXPECT_EQ(dist::rank(), rank);
  });
}

TEST(ConvertTest, ALayerWithoutStatisticsAndWeightIsListed) {
  nn::Sequential net(
      nn::BatchNorm1d(nn::BatchNorm1dOptions(3).affine(false).track_running_stats(false)));
  const auto report = dist::convert_sync_batchnorm(*net);
  EXPECT_TRUE(report.converted.empty());
  ASSERT_EQ(report.not_converted.size(), 1u);
  EXPECT_EQ(report.not_converted[0].name, "0");
}

constexpr char kScriptLayer[] = R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-5, False)
)";
constexpr char kScriptNet[] = R"(
def forward(self, x: Tensor) -> Tensor:
    x = torch.relu(self.bn0.forward(torch.conv2d(x, self.conv)))
    x = torch.relu(self.bn1.forward(x))
    x = self.bn2.forward(x) * 0.5
    x = torch.relu(self.bn3.forward(x))
    return torch.mm(self.bn4.forward(x).mean([2, 3]), self.linear)
)";

/// As torch.jit.load gives it: a net with five batch-norm submodules.
torch::jit::Module script_net() {
  at::manual_seed(0);
  torch::jit::Module net("Net");
  const auto parameter = [](torch::jit::Module& module, const char* name, const at::Tensor& value) {
    module.register_parameter(name, value.requires_grad_(), /*is_buffer=*/false);
  };
  const auto training_flag = [](torch::jit::Module& module) {
    module.register_attribute("training", c10::BoolType::get(), true);
  };
  training_flag(net);
  parameter(net, "conv", at::randn({4, 3, 3, 3}));
  parameter(net, "linear", at::randn({4, 2}));
  for (int i = 0; i < kLayers; ++i) {
    torch::jit::Module layer("BatchNorm2d" + std::to_string(i));
    training_flag(layer);
    parameter(layer, "weight", at::ones({4}));
    parameter(layer, "bias", at::zeros({4}));
    layer.register_buffer("running_mean", at::zeros({4}));
    layer.register_buffer("running_var", at::ones({4}));
    layer.define(kScriptLayer);
    net.register_module("bn" + std::to_string(i), layer);
  }
  net.define(kScriptNet);
  net.train();
  std::stringstream file;
  net.save(file);
  return torch::jit::load(file);
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& module) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module.parameters()) parameters.push_back(parameter);
  return parameters;
}

void expect_script_trains_as_whole_batch(bool warm_up) {
  run_ranks(2, [warm_up](int rank) {
    dist::init_process_group();
    torch::jit::Module net = script_net();
    torch::jit::Module reference = script_net();
    const auto run = [](torch::jit::Module& module, const at::Tensor& x) {
      return module.forward({x}).toTensor();
    };
    if (warm_up) {
      // The executor specialises and optimises its graphs over the first runs.
      for (int i = 0; i < 3; ++i) {
        const at::Tensor batch = at::ones({4, 3, 6, 6}) * (i + 1.0);
        for (torch::jit::Module* module : {&net, &reference}) {
          run(*module, batch).sum().backward();
          for (const at::Tensor& p : module->parameters()) p.mutable_grad() = at::Tensor();
        }
      }
    }
    const auto report = dist::convert_sync_batchnorm(net);
    EXPECT_THAT(report.converted, ElementsAre("bn0", "bn1", "bn2", "bn3", "bn4"));
    expect_trains_as_whole_batch([&](const at::Tensor& x) { return run(net, x); },
                                 parameters_of(net),
                                 [&](const at::Tensor& x) { return run(reference, x); },
                                 parameters_of(reference), rank, Gradients::kLocal);
  });
}

TEST(ConvertScriptTest, TrainsAsOnTheWholeBatch) {
  expect_script_trains_as_whole_batch(/*warm_up=*/false);
}

TEST(ConvertScriptTest, TrainsAsOnTheWholeBatchAfterTheExecutorHasOptimisedIt) {
  expect_script_trains_as_whole_batch(/*warm_up=*/true);
}

TEST(ConvertScriptTest, RevertGivesAModuleThatSavesAndLoadsWithoutUs) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    const at::Tensor batch = at::randn({4, 3, 6, 6});
    net.forward({batch});
    dist::revert_sync_batchnorm(net);
    const uint64_t before = exchanges();
    net.forward({batch});
    EXPECT_EQ(exchanges(), before);
    std::stringstream file;
    net.save(file);
    EXPECT_EQ(file.str().find("syncbn"), std::string::npos);
  });
}

}  // namespace

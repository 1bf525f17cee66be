// convert_sync_batchnorm on TorchScript modules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <sstream>

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "batch_norm/convert.h"
#include "dist/convert_cases.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
using syncbn::test::exchanges;
using syncbn::test::expect_trains_as_whole_batch;
using syncbn::test::Gradients;
using syncbn::test::kLayers;
using syncbn::test::run_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

TEST(ConvertScriptTest, WhereAWrapperCameFirstItsModuleIsConverted) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    dist::DistributedDataParallel<torch::jit::Module> ddp(script_net());
    dist::convert_sync_batchnorm(ddp.module());
    exchanges();
    for (int step = 0; step < 3; ++step) {
      const uint64_t before = exchanges();
      ddp(at::randn({4, 3, 6, 6})).toTensor().sum().backward();
      EXPECT_EQ(exchanges() - before, 2u * kLayers) << step;
    }
  });
}

constexpr char kOwnLayer[] = R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, self.scale, None, self.mean, self.var, self.training, 0.1, 1e-5, False)
)";
constexpr char kOwnNet[] = R"(
def forward(self, x: Tensor) -> Tensor:
    x = self.norm.forward(x) + torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
    return self.bare.forward(x)
)";
constexpr char kBareLayer[] = R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, None, None, self.training, 0.1, 1e-5, False)
)";

/// A layer of a class that is not called batch norm, one without any tensors, and a bare call.
torch::jit::Module own_net() {
  torch::jit::Module net("Net");
  torch::jit::Module norm("MyNorm");
  torch::jit::Module bare("BatchNorm1d");
  for (torch::jit::Module* one : {&net, &norm, &bare}) {
    one->register_attribute("training", c10::BoolType::get(), true);
  }
  norm.register_parameter("scale", at::ones({3}).requires_grad_(), /*is_buffer=*/false);
  norm.register_buffer("mean", at::zeros({3}));
  norm.register_buffer("var", at::ones({3}));
  norm.define(kOwnLayer);
  bare.define(kBareLayer);
  net.register_module("norm", norm);
  net.register_module("bare", bare);
  net.define(kOwnNet);
  return net;
}

TEST(ConvertScriptTest, LayersOfAnyClassAreConvertedAndTheRestIsReported) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    torch::jit::Module net = own_net();
    const auto report = dist::convert_sync_batchnorm(net);
    EXPECT_THAT(report.converted, ElementsAre("norm"));
    ASSERT_EQ(report.not_converted.size(), 2u);
    EXPECT_EQ(report.not_converted[0].name, "bare");
    EXPECT_THAT(report.not_converted[1].reason, HasSubstr("1 call(s) of batch_norm"));
    exchanges();
    const uint64_t before = exchanges();
    for (int step = 0; step < 5; ++step) {
      net.forward({at::randn({4, 3}).requires_grad_()}).toTensor().sum().backward();
    }
    EXPECT_EQ(exchanges() - before, 10u);
    dist::revert_sync_batchnorm(net);
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
  });
}

}  // namespace

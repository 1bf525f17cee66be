// convert_sync_batchnorm on TorchScript modules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <exception>
#include <sstream>
#include <stdexcept>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "batch_norm/convert.h"
#include "dist/convert_cases.h"
#include "dist/device.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using syncbn::base::UserError;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::expect_steps;
using syncbn::test::expect_trains_as_whole_batch;
using syncbn::test::Gradients;
using syncbn::test::kLayers;
using syncbn::test::kSteps;
using syncbn::test::message_of;
using syncbn::test::ones;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using syncbn::test::Steps;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ConvertScriptTest = syncbn::test::DeviceTest;

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

/// A net with five batch-norm submodules, as torch.jit.load returns it.
torch::jit::Module script_net(at::Device place = device()) {
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
  return torch::jit::load(file, place);
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& module) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module.parameters()) parameters.push_back(parameter);
  return parameters;
}

void expect_script_trains_as_whole_batch(bool warm_up) {
  run_on_device(2, [warm_up](int rank) {
    torch::jit::Module net = script_net();
    torch::jit::Module reference = script_net();
    const auto run = [](torch::jit::Module& module, const at::Tensor& x) {
      return module.forward({x}).toTensor();
    };
    if (warm_up) {
      // The executor specialises and optimises its graphs during the first runs.
      for (int i = 0; i < 3; ++i) {
        const at::Tensor batch = ones({4, 3, 6, 6}) * (i + 1.0);
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

TEST_F(ConvertScriptTest, TrainsAsOnTheWholeBatch) {
  expect_script_trains_as_whole_batch(/*warm_up=*/false);
}

TEST_F(ConvertScriptTest, TrainsAsOnTheWholeBatchAfterTheExecutorHasOptimisedIt) {
  expect_script_trains_as_whole_batch(/*warm_up=*/true);
}

/// Trains through any handle and checks the number of exchanges in each step.
template <class Net>
void expect_script_steps(Net& net, const torch::jit::Module& module, const Steps& steps = {}) {
  const auto forward = [&](const at::Tensor& x) { return net.forward({x}).toTensor(); };
  expect_steps(forward, parameters_of(module), steps);
}

TEST_F(ConvertScriptTest, RevertGivesAModuleThatSavesAndLoadsWithoutUs) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    expect_script_steps(net, net);
    dist::revert_sync_batchnorm(net);
    expect_script_steps(net, net, {.exchanges = 0});
    std::stringstream file;
    net.save(file);
    EXPECT_EQ(file.str().find("syncbn"), std::string::npos);
    torch::jit::Module loaded = torch::jit::load(file, device());
    expect_script_steps(loaded, loaded, {.exchanges = 0});
  });
}

// The tensors get new memory: on the tests' device instead of the CPU, or with another type.
TEST_F(ConvertScriptTest, AModuleThatMovesStaysConverted) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net(at::kCPU);
    dist::convert_sync_batchnorm(net);
    net.to(device());
    expect_script_steps(net, net);
    net.to(at::kDouble);
    expect_script_steps(net, net, {.dtype = at::kDouble});
  });
}

TEST_F(ConvertScriptTest, DestroyedModulesLeaveNothingBehind) {
  run_on_device(2, [](int) {
    for (int i = 0; i < 20; ++i) {
      torch::jit::Module net = script_net();
      dist::convert_sync_batchnorm(net);
      // The running mean and the weight of each layer.
      EXPECT_EQ(dist::detail::registered_keys(), 2u * kLayers);
      // The executor and autograd have seen the tensors of some modules, and must not keep them
      // alive.
      if (i % 10 == 0) expect_script_steps(net, net);
    }
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    // New modules may have the addresses of destroyed ones.
    exchanges();
    for (int i = 0; i < 20; ++i) {
      const uint64_t before = exchanges();
      script_net().forward({randn({4, 3, 6, 6})}).toTensor().sum().backward();
      EXPECT_EQ(exchanges(), before);
    }
  });
}

TEST_F(ConvertScriptTest, WhereAWrapperCameFirstItsModuleIsConverted) {
  run_on_device(2, [](int) {
    dist::DistributedDataParallel<torch::jit::Module> ddp(script_net());
    // The executor has optimised its code before the conversion.
    expect_script_steps(ddp, ddp.module(), {.exchanges = 0});
    dist::convert_sync_batchnorm(ddp.module());
    expect_script_steps(ddp, ddp.module());
  });
}

/// TorchScript's interpreter replaces every exception by its own.
template <class Net>
void expect_refused(Net& net) {
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_THAT(message_of<std::exception>([&] {
                  net.forward({randn({4, 3, 6, 6})});
                }),
                AllOf(HasSubstr("layer 'bn0' was converted, but runs in code from before"),
                      HasSubstr("convert its module()")));
  }
}

// Both before and after the executor has optimised the code of the other handle.
TEST_F(ConvertScriptTest, OtherHandlesToWhatWasConvertedAreRefusedNotTrainedInHalf) {
  run_on_device(2, [](int) {
    for (const bool warm_up : {false, true}) {
      torch::jit::Module net = script_net();
      torch::jit::Module other = net;
      if (warm_up) expect_script_steps(other, other, {.exchanges = 0});
      dist::convert_sync_batchnorm(net);
      expect_refused(other);
      expect_script_steps(net, net);
      dist::revert_sync_batchnorm(net);
      expect_script_steps(other, other, {.exchanges = 0});
    }
  });
}

TEST_F(ConvertScriptTest, OtherHandlesAreRefusedWhenWhatWasConvertedIsGone) {
  run_on_device(2, [](int) {
    torch::jit::Module other = script_net();
    {
      torch::jit::Module net = other;
      dist::convert_sync_batchnorm(net);
    }
    torch::jit::Module another = script_net();
    dist::convert_sync_batchnorm(another);
    expect_refused(other);
    expect_script_steps(another, another);
  });
}

// For example to save in the middle of training.
TEST_F(ConvertScriptTest, WhatWasRevertedThroughAnotherHandleDoesNotTrainOnAlone) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    expect_script_steps(ddp, net);
    torch::jit::Module clone = net.clone();
    dist::revert_sync_batchnorm(clone);
    expect_script_steps(ddp, net);
    EXPECT_EQ(dist::detail::registered_keys(), 2u * kLayers);

    dist::revert_sync_batchnorm(net);
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_THAT(message_of<UserError>([&] {
                    ddp(randn({4, 3, 6, 6}));
                  }),
                  HasSubstr("layer 'bn0' was reverted through another handle"));
    }
    ddp.eval();
    EXPECT_TRUE(ddp(randn({4, 3, 6, 6})).toTensor().defined());
    ddp.train();
    expect_script_steps(net, net, {.exchanges = 0});
    dist::convert_sync_batchnorm(net);
    expect_script_steps(ddp, net);
  });
}

TEST_F(ConvertScriptTest, AHandleThatEvaluatesLeavesOthersTheirTraining) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    dist::convert_sync_batchnorm(net);
    net.eval();
    expect_script_steps(ddp, ddp.module());
  });
}

TEST_F(ConvertScriptTest, AWrapperAroundAnotherHandleIsRefusedUntilItsModuleIsConverted) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    expect_script_steps(ddp, net, {.exchanges = 0});
    dist::convert_sync_batchnorm(net);
    expect_refused(ddp);
    EXPECT_THAT(message_of<UserError>([&] {
                  ddp(randn({4, 3, 6, 6}));
                }),
                StartsWith("SyncBatchNorm: the TorchScript layer 'bn0' was converted"));
    dist::convert_sync_batchnorm(ddp.module());
    expect_script_steps(ddp, ddp.module());
  });
}

TEST_F(ConvertScriptTest, PartsOfWhatWasConvertedAreToo) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    torch::jit::Module part = net.attr("bn3").toModule();
    expect_script_steps(part, part, {.exchanges = 1, .batch = {4, 4, 2, 2}});
    expect_script_steps(net, net);
  });
}

TEST_F(ConvertScriptTest, WhatAConvertedPartBelongsToIsRefused) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    expect_script_steps(net, net, {.exchanges = 0});
    torch::jit::Module part = net.attr("bn3").toModule();
    EXPECT_THAT(dist::convert_sync_batchnorm(part).converted, ElementsAre(""));
    expect_script_steps(part, part, {.exchanges = 1, .batch = {4, 4, 2, 2}});
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_THAT(message_of<std::exception>([&] {
                    net.forward({randn({4, 3, 6, 6})});
                  }),
                  HasSubstr("was converted, but runs in code from before"));
    }
    dist::convert_sync_batchnorm(net);
    expect_script_steps(net, net);
  });
}

TEST_F(ConvertScriptTest, CopiesAreNotConverted) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    expect_script_steps(net, net);
    torch::jit::Module copy = net.deepcopy();
    torch::jit::Module clone = net.clone();
    for (torch::jit::Module* one : {&copy, &clone}) {
      expect_script_steps(*one, *one, {.exchanges = 0});
      dist::convert_sync_batchnorm(*one);
      expect_script_steps(*one, *one);
    }
    expect_script_steps(net, net);
  });
}

TEST_F(ConvertScriptTest, WorksUnderAutocast) {
  run_on_device(2, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    const auto forward = [&](const at::Tensor& x) {
      at::autocast::set_autocast_enabled(device().type(), true);
      at::Tensor output = net.forward({x}).toTensor();
      at::autocast::set_autocast_enabled(device().type(), false);
      at::autocast::clear_cache();
      return output;
    };
    expect_steps(forward, parameters_of(net));
    // Without autocast the executor runs other code.
    expect_script_steps(net, net);
  });
}

TEST_F(ConvertScriptTest, AWrapperThrowsWhatALayerDoes) {
  run_on_device(2, [](int rank) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    EXPECT_THAT(message_of<UserError>([&] {
                  ddp(randn({1 - rank, 3, 3, 3}));
                }),
                StartsWith("SyncBatchNorm: one value per channel over all 2 ranks"));
    expect_script_steps(ddp, net);
    // The interpreter replaces other exceptions.
    EXPECT_THAT(message_of<std::runtime_error>([&] {
                  ddp(randn({4, 1, 6, 6}));
                }),
                HasSubstr("TorchScript interpreter"));
  });
}

// The executor has removed the layer's own check from the graph by then.
TEST_F(ConvertScriptTest, AloneOneValueAChannelIsStillRefused) {
  run_on_device(1, [](int) {
    torch::jit::Module net = script_net();
    dist::convert_sync_batchnorm(net);
    torch::jit::Module copy = net.deepcopy();
    for (torch::jit::Module* one : {&net, &copy}) {
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_THAT(message_of<std::exception>([&] {
                      one->forward({randn({1, 3, 3, 3})});
                    }),
                    HasSubstr("one value per channel"));
      }
    }
    net.eval();
    net.forward({randn({1, 3, 3, 3})});
  });
}

constexpr char kOwnLayer[] = R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, self.scale, None, self.mean, self.var, self.training, 0.1, 1e-5, False)
)";
constexpr char kOwnNet[] = R"(
def forward(self, x: Tensor) -> Tensor:
    x = self.norm3.forward(self.norm2.forward(self.norm1.forward(self.norm0.forward(x))))
    x = self.norm4.forward(x) + torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
    return self.bare.forward(x)
)";
constexpr char kBareLayer[] = R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, None, None, self.training, 0.1, 1e-5, False)
)";

/// Layers of a class whose name is not batch norm's, and a module without tensors, named
/// BatchNorm1d, that only calls batch_norm.
torch::jit::Module own_net() {
  torch::jit::Module net("BatchNormNet");
  const auto with_training = [](const std::string& name) {
    torch::jit::Module module(name);
    module.register_attribute("training", c10::BoolType::get(), true);
    return module;
  };
  for (int i = 0; i < kLayers; ++i) {
    torch::jit::Module norm = with_training("MyNorm" + std::to_string(i));
    norm.register_parameter("scale", at::ones({3}).requires_grad_(), /*is_buffer=*/false);
    norm.register_buffer("mean", at::zeros({3}));
    norm.register_buffer("var", at::ones({3}));
    norm.define(kOwnLayer);
    net.register_module("norm" + std::to_string(i), norm);
  }
  torch::jit::Module bare = with_training("BatchNorm1d");
  bare.define(kBareLayer);
  net.register_module("bare", bare);
  net.define(kOwnNet);
  net.to(device());
  return net;
}

TEST_F(ConvertScriptTest, LayersOfAnyClassAreConvertedAndTheRestIsReported) {
  run_on_device(2, [](int) {
    torch::jit::Module net = own_net();
    const auto report = dist::convert_sync_batchnorm(net);
    EXPECT_THAT(report.converted, ElementsAre("norm0", "norm1", "norm2", "norm3", "norm4"));
    ASSERT_EQ(report.not_converted.size(), 2u);
    EXPECT_EQ(report.not_converted[0].name, "bare");
    EXPECT_THAT(report.not_converted[1].reason, HasSubstr("1 call(s) of batch_norm"));
    expect_script_steps(net, net, {.batch = {4, 3}});
    dist::revert_sync_batchnorm(net);
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
  });
}

}  // namespace

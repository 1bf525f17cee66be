#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/train/optimizer.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <cmath>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "train/from_yaml.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<Optimizer> optimizer(const std::string& yaml, const NamedTensors& parameters) {
  return from_yaml<OptimizerKind>(yaml, "optimizer").make(parameters);
}

NamedTensors make_parameters() {
  at::manual_seed(1);
  NamedTensors parameters;
  parameters.emplace_back("weight", at::randn({3, 4}).set_requires_grad(true));
  parameters.emplace_back("bias", at::randn({4}).set_requires_grad(true));
  return parameters;
}

void set_gradients(const NamedTensors& parameters, int64_t step) {
  at::manual_seed(static_cast<uint64_t>(100 + step));
  for (const auto& [name, parameter] : parameters) {
    parameter.mutable_grad() = at::randn(parameter.sizes());
  }
}

/// Compares five steps with those of libtorch's optimizer, on the same gradients.
template <class Theirs>
void expect_same_steps(const std::string& yaml, const std::function<Theirs(NamedTensors)>& make) {
  const NamedTensors ours = make_parameters();
  const NamedTensors reference = make_parameters();
  const auto mine = optimizer(yaml, ours);
  Theirs theirs = make(reference);
  for (int64_t step = 0; step < 5; ++step) {
    set_gradients(ours, step);
    set_gradients(reference, step);
    mine->step(mine->base_lr());
    theirs.step();
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours[i].second, reference[i].second, 1e-6, 1e-7))
          << yaml << " " << ours[i].first << " step " << step;
    }
  }
}

std::vector<at::Tensor> tensors(const NamedTensors& parameters) {
  return {parameters[0].second, parameters[1].second};
}

TEST(OptimizerTest, SgdStepsAsLibtorchsDoes) {
  using torch::optim::SGD;
  using torch::optim::SGDOptions;
  expect_same_steps<SGD>("{type: sgd, lr: 0.1}",
                         [](auto p) { return SGD(tensors(p), SGDOptions(0.1)); });
  expect_same_steps<SGD>("{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01}", [](auto p) {
    return SGD(tensors(p), SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  });
  expect_same_steps<SGD>("{type: sgd, lr: 0.1, momentum: 0.9, nesterov: true}", [](auto p) {
    return SGD(tensors(p), SGDOptions(0.1).momentum(0.9).nesterov(true));
  });
}

TEST(OptimizerTest, AdamwStepsAsLibtorchsDoes) {
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  expect_same_steps<AdamW>("{type: adamw, lr: 0.01}",
                           [](auto p) { return AdamW(tensors(p), AdamWOptions(0.01)); });
  expect_same_steps<AdamW>(
      "{type: adamw, lr: 0.01, betas: [0.8, 0.95], eps: 0.001, weight_decay: 0.1}", [](auto p) {
        return AdamW(tensors(p),
                     AdamWOptions(0.01).betas({0.8, 0.95}).eps(0.001).weight_decay(0.1));
      });
}

/// Three steps with known gradients.
std::vector<float> after_three_steps(const std::string& yaml) {
  at::Tensor parameter = (at::arange(6, at::kFloat) / 10).set_requires_grad(true);
  const auto mine = optimizer(yaml, {{"p", parameter}});
  for (int step = 1; step <= 3; ++step) {
    parameter.mutable_grad() = (at::arange(6, at::kFloat) - 2.5) * 0.1 * step;
    mine->step(mine->base_lr());
  }
  const float* values = parameter.const_data_ptr<float>();
  return {values, values + 6};
}

TEST(OptimizerTest, GivesTheValuesOfPythonsTorchOptim) {
  using ::testing::FloatNear;
  using ::testing::Pointwise;
  for (const char* fused : {"true", "false"}) {
    const auto values = [&](const std::string& options) {
      return after_three_steps(fmt::format("{{{}, fused: {}}}", options, fused));
    };
    EXPECT_THAT(values("type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01"),
                Pointwise(FloatNear(2e-7F), {0.237605020F, 0.242002502F, 0.246399969F, 0.250797480F,
                                             0.255194932F, 0.259592384F}));
    EXPECT_THAT(values("type: sgd, lr: 0.1, momentum: 0.9, nesterov: true"),
                Pointwise(FloatNear(2e-7F), {0.363975018F, 0.318385005F, 0.272794992F, 0.227205008F,
                                             0.181615010F, 0.136024997F}));
    EXPECT_THAT(values("type: adamw, lr: 0.01"),
                Pointwise(FloatNear(2e-7F), {0.029228866F, 0.129198864F, 0.229168892F, 0.270681143F,
                                             0.370651156F, 0.470621139F}));
  }
}

/// Runs five steps of each of Python's optimizers on the parameters and gradients of this file.
/// Prints a line per optimizer: the parameters' elements as integers of the same bits.
constexpr const char* kFiveSteps = R"(
import sys, torch
for optimizer in sys.argv[1:]:
    torch.manual_seed(1)
    parameters = [torch.randn(shape).requires_grad_() for shape in ((3, 4), (4,))]
    optimizer = eval("torch.optim." + optimizer)
    for step in range(5):
        torch.manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    print(*flat.view(torch.int32).tolist())
)";

std::string five_steps(const std::string& yaml) {
  const NamedTensors parameters = make_parameters();
  const auto mine = optimizer(yaml, parameters);
  for (int64_t step = 0; step < 5; ++step) {
    set_gradients(parameters, step);
    mine->step(mine->base_lr());
  }
  const at::Tensor bits =
      at::cat({parameters[0].second.detach().flatten(), parameters[1].second.detach()})
          .view(at::kInt);
  const int32_t* values = bits.const_data_ptr<int32_t>();
  return fmt::format("{}\n", fmt::join(values, values + bits.numel(), " "));
}

/// Whether Python's torch has the version of this test's libtorch. Other versions may round
/// differently.
bool python_has_this_torch() {
  const auto result = test::run_program(
      {test::python(), "-c", "import torch; print(torch.__version__.split('+')[0])"});
  return result.exit_code == 0 && result.out == TORCH_VERSION "\n";
}

TEST(OptimizerTest, EqualsPythonsBitForBit) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  std::string ours;
  std::vector<std::string> python = {test::python(), "-c", kFiveSteps};
  const auto compare = [&](const std::string& yaml, const std::string& theirs) {
    ours += five_steps(yaml);
    python.push_back(theirs);
  };
  compare("{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01, fused: false}",
          "SGD(parameters, 0.1, 0.9, weight_decay=0.01, foreach=True)");
  compare("{type: sgd, lr: 0.1, momentum: 0.9, nesterov: true, fused: false}",
          "SGD(parameters, 0.1, 0.9, nesterov=True)");
  compare("{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01}",
          "SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=True)");
  compare("{type: adamw, lr: 0.01, fused: false}", "AdamW(parameters, 0.01, foreach=True)");
  compare("{type: adamw, lr: 0.01, fused: false}", "AdamW(parameters, 0.01)");
  compare("{type: adamw, lr: 0.01}", "AdamW(parameters, 0.01, fused=True)");
  compare("{type: adam, lr: 0.01, fused: false}", "Adam(parameters, 0.01)");
  compare("{type: adam, lr: 0.01, weight_decay: 0.1, betas: [0.8, 0.9], fused: false}",
          "Adam(parameters, 0.01, (0.8, 0.9), weight_decay=0.1)");
  compare("{type: adam, lr: 0.01, weight_decay: 0.1}",
          "Adam(parameters, 0.01, weight_decay=0.1, fused=True)");
  compare("rmsprop", "RMSprop(parameters)");
  compare("{type: rmsprop, lr: 0.1, momentum: 0.9, weight_decay: 0.1, centered: true}",
          "RMSprop(parameters, 0.1, momentum=0.9, weight_decay=0.1, centered=True)");
  compare("{type: rmsprop, alpha: 0.9, eps: 0.001, centered: true}",
          "RMSprop(parameters, alpha=0.9, eps=0.001, centered=True)");
  // Groups: the bias alone, and both.
  compare("{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01, no_decay: [bias], fused: false}",
          "SGD([{'params': parameters[:1]}, {'params': parameters[1:], 'weight_decay': 0}], 0.1, "
          "0.9, weight_decay=0.01)");
  compare(
      "{type: adamw, lr: 0.01, fused: false, groups: [{match: 'we*', lr: 0.1x, weight_decay: "
      "0.3}, {match: bias, lr: 0.002}]}",
      "AdamW([{'params': parameters[:1], 'lr': 0.01 * 0.1, 'weight_decay': 0.3}, {'params': "
      "parameters[1:], 'lr': 0.002}], 0.01)");
  const auto result = test::run_program(python);
  EXPECT_EQ(ours, result.out) << "a line for each: " << ::testing::PrintToString(python)
                              << result.err;
}

constexpr const char* kKinds[] = {"{type: sgd, momentum: 0.9, weight_decay: 0.01}",
                                  "{type: sgd, momentum: 0.9, weight_decay: 0.01, fused: false}",
                                  "{type: adamw}",
                                  "{type: adamw, fused: false}",
                                  "{type: adam, weight_decay: 0.1}",
                                  "{type: rmsprop, momentum: 0.9, centered: true}",
                                  "{type: lamb}"};

/// Convolution filters.
NamedTensors make_filters(at::MemoryFormat format, at::ScalarType type = at::kFloat) {
  at::manual_seed(1);
  NamedTensors parameters;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{8, 3, 3, 3}, {8, 8, 1, 1}}) {
    const at::Tensor values = at::randn(shape).to(type).contiguous(format);
    parameters.emplace_back(fmt::format("{}", parameters.size()), values.set_requires_grad(true));
  }
  return parameters;
}

TEST(OptimizerTest, GradientsMayHaveOtherStridesThanParameters) {
  for (const char* yaml : kKinds) {
    const NamedTensors plain = make_filters(at::MemoryFormat::Contiguous);
    const NamedTensors turned = make_filters(at::MemoryFormat::ChannelsLast);
    const auto one = optimizer(yaml, plain);
    const auto other = optimizer(yaml, turned);
    for (int64_t step = 0; step < 3; ++step) {
      set_gradients(plain, step), one->step(0.1);
      set_gradients(turned, step), other->step(0.1);
    }
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(plain[i].second, turned[i].second, 1e-6, 1e-7)) << yaml;
      EXPECT_TRUE(turned[i].second.is_contiguous(at::MemoryFormat::ChannelsLast));
    }
    // A checkpoint holds contiguous state; these parameters are channels-last.
    const NamedTensors copied = make_filters(at::MemoryFormat::ChannelsLast);
    for (size_t i = 0; i < copied.size(); ++i) {
      copied[i].second.detach().copy_(plain[i].second.detach());
    }
    const auto resumed = optimizer(yaml, copied);
    resumed->load(one->state());
    set_gradients(plain, 3), one->step(0.1);
    set_gradients(copied, 3), resumed->step(0.1);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(plain[i].second, copied[i].second, 1e-6, 1e-7)) << yaml;
    }
  }
}

TEST(OptimizerTest, ParametersOfSeveralTypesKeepTheirTypes) {
  for (const char* yaml : kKinds) {
    NamedTensors parameters = make_filters(at::MemoryFormat::Contiguous, at::kFloat);
    NamedTensors doubles = make_filters(at::MemoryFormat::Contiguous, at::kDouble);
    for (auto& [name, parameter] : doubles) parameters.emplace_back("double" + name, parameter);
    const auto mine = optimizer(yaml, parameters);
    for (int step = 0; step < 3; ++step) {
      for (const auto& [name, parameter] : parameters) {
        parameter.mutable_grad() = at::ones_like(parameter) * (step - 0.5);
      }
      mine->step(0.1);
    }
    for (size_t i = 0; i < doubles.size(); ++i) {
      EXPECT_TRUE(at::allclose(parameters[i].second.to(at::kDouble), doubles[i].second, 1e-5, 1e-6))
          << yaml;
    }
  }
}

TEST(OptimizerTest, AParameterCountsStepsFromItsFirstGradient) {
  for (const char* yaml : kKinds) {
    const NamedTensors late = make_parameters();
    const NamedTensors alone = make_parameters();
    const auto mine = optimizer(yaml, late);
    const auto reference = optimizer(yaml, {alone[1]});
    for (int64_t step = 0; step < 4; ++step) {
      set_gradients(late, step);
      if (step < 2) late[1].second.mutable_grad() = at::Tensor();
      mine->step(0.1);
      if (step < 2) continue;
      set_gradients(alone, step), reference->step(0.1);
    }
    EXPECT_TRUE(at::equal(late[1].second, alone[1].second)) << yaml;
  }
}

at::Tensor sparse_rows() {
  return at::sparse_coo_tensor(at::tensor({0, 2}, at::kLong).unsqueeze(0), at::ones({2, 4}),
                               {3, 4});
}

TEST(OptimizerTest, SparseGradientsAreUsedWherePythonUsesThem) {
  for (const char* yaml : {"{type: sgd}", "{type: sgd, momentum: 0.9}",
                           "{type: sgd, momentum: 0.9, nesterov: true}"}) {
    const NamedTensors sparse = make_parameters();
    const NamedTensors dense = make_parameters();
    const auto one = optimizer(yaml, {sparse[0]});
    const auto other = optimizer(yaml, {dense[0]});
    for (int step = 0; step < 3; ++step) {
      sparse[0].second.mutable_grad() = sparse_rows();
      dense[0].second.mutable_grad() = sparse_rows().to_dense();
      one->step(0.1), other->step(0.1);
    }
    EXPECT_TRUE(at::allclose(sparse[0].second, dense[0].second, 1e-6, 1e-7)) << yaml;
  }
  for (const char* yaml : {"{type: adamw}", "{type: sgd, weight_decay: 0.1}"}) {
    const NamedTensors parameters = make_parameters();
    parameters[0].second.mutable_grad() = sparse_rows();
    try {
      optimizer(yaml, parameters)->step(0.1);
      ADD_FAILURE() << yaml << " took a sparse gradient";
    } catch (const base::UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the gradient of parameter 'weight' is sparse"));
    }
  }
}

TEST(OptimizerTest, ResumesFromItsStateBitForBit) {
  for (const char* yaml : kKinds) {
    const NamedTensors whole = make_parameters();
    const auto first = optimizer(yaml, whole);
    for (int64_t step = 0; step < 2; ++step) set_gradients(whole, step), first->step(0.1);

    NamedTensors copied;
    for (const auto& [name, parameter] : whole) {
      copied.emplace_back(name, parameter.detach().clone().set_requires_grad(true));
    }
    const auto second = optimizer(yaml, copied);
    second->load(first->state());
    for (int64_t step = 2; step < 4; ++step) {
      set_gradients(whole, step), first->step(0.1);
      set_gradients(copied, step), second->step(0.1);
    }
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::equal(whole[i].second, copied[i].second)) << yaml;
    }
  }
}

TEST(OptimizerTest, LeavesParametersWithoutAGradientAlone) {
  const NamedTensors parameters = make_parameters();
  const at::Tensor before = parameters[1].second.detach().clone();
  parameters[0].second.mutable_grad() = at::ones({3, 4});
  optimizer("{type: sgd, weight_decay: 0.5}", parameters)->step(0.1);
  EXPECT_TRUE(at::equal(parameters[1].second, before));
}

TEST(OptimizerTest, RefusesStateOfOtherParameters) {
  const auto mine = optimizer("sgd", make_parameters());
  EXPECT_THROW(mine->load({{"nowhere", {{"momentum_buffer", at::ones({1})}}}}), base::UserError);
  EXPECT_THROW(mine->load({{"bias", {{"momentum_buffer", at::ones({5})}}}}), base::UserError);
}

TEST(OptimizerTest, AStepWhoseGradientsAreNotFiniteChangesNothing) {
  for (const char* yaml : kKinds) {
    const NamedTensors skipping = make_parameters();
    const NamedTensors reference = make_parameters();
    const auto mine = optimizer(yaml, skipping);
    const auto other = optimizer(yaml, reference);
    for (int64_t step = 0; step < 4; ++step) {
      set_gradients(skipping, step);
      const bool skips = step == 0 || step == 2;
      mine->step(0.1, at::scalar_tensor(skips ? 1.0F : 0.0F));
      if (skips) continue;
      set_gradients(reference, step), other->step(0.1);
    }
    for (size_t i = 0; i < skipping.size(); ++i) {
      EXPECT_TRUE(at::equal(skipping[i].second, reference[i].second)) << yaml;
    }
  }
}

/// The paper's formula in float64.
at::Tensor lamb_steps(at::Tensor parameter, double weight_decay, bool clips) {
  at::Tensor mean = at::zeros_like(parameter);
  at::Tensor square = at::zeros_like(parameter);
  for (int step = 1; step <= 4; ++step) {
    const at::Tensor gradient = (at::arange(6, at::kDouble) - 2.5) * 0.1 * step;
    mean = 0.9 * mean + 0.1 * gradient;
    square = 0.99 * square + 0.01 * gradient * gradient;
    at::Tensor update =
        mean / (1 - std::pow(0.9, step)) / ((square / (1 - std::pow(0.99, step))).sqrt() + 1e-6);
    if (weight_decay > 0) {
      update = update + weight_decay * parameter;
      at::Tensor ratio = parameter.norm() / update.norm();
      if (clips) ratio = ratio.clamp_max(1);
      update = update * ratio;
    }
    parameter = parameter - 0.05 * update;
  }
  return parameter;
}

TEST(OptimizerTest, LambFollowsThePaper) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool clips : {false, true}) {
      const at::Tensor start = at::arange(6, at::kDouble) + 1;
      const at::Tensor parameter = start.clone().set_requires_grad(true);
      const auto mine = optimizer(
          fmt::format(
              "{{type: lamb, lr: 0.05, betas: [0.9, 0.99], weight_decay: {}, trust_clip: {}}}",
              weight_decay, clips),
          {{"p", parameter}});
      for (int step = 1; step <= 4; ++step) {
        parameter.mutable_grad() = (at::arange(6, at::kDouble) - 2.5) * 0.1 * step;
        mine->step(0.05);
      }
      EXPECT_TRUE(at::allclose(parameter, lamb_steps(start, weight_decay, clips), 1e-12, 1e-12));
    }
  }
}

std::string parameter_error(const std::string& yaml) {
  try {
    optimizer(yaml, make_parameters());
  } catch (const base::UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(OptimizerTest, NamesPatternsThatMatchNothing) {
  EXPECT_THAT(parameter_error("{type: sgd, no_decay: [norm]}"),
              HasSubstr("optimizer.no_decay: 'norm' matches no parameter; there are weight, bias"));
  EXPECT_THAT(parameter_error("{type: sgd, groups: [{match: bias}, {match: 'backbone.*'}]}"),
              HasSubstr("optimizer.groups[1].match: 'backbone.*' matches no parameter"));
  EXPECT_THAT(parameter_error("{type: sgd, groups: [{match: bias, lr: fast}]}"),
              HasSubstr("optimizer.groups[0].lr: expected a rate such as 0.01, or a factor such as "
                        "0.1x, got 'fast'"));
}

TEST(OptimizerTest, LowerLayersLearnMoreSlowly) {
  NamedTensors parameters;
  for (const char* name :
       {"stem.weight", "stem.bias", "body.0.weight", "body.1.weight", "head.bias"}) {
    parameters.emplace_back(name, at::zeros({1}).set_requires_grad(true));
    parameters.back().second.mutable_grad() = at::ones({1});
  }
  optimizer("{type: sgd, layer_decay: 0.5}", parameters)->step(1);
  std::vector<float> moved;
  for (const auto& [name, parameter] : parameters) moved.push_back(-parameter.item<float>());
  EXPECT_THAT(moved, ::testing::ElementsAre(0.25F, 0.25F, 0.5F, 0.5F, 1.0F));
}

TEST(OptimizerTest, TellsTheBatchThatItsRateIsFor) {
  EXPECT_EQ(optimizer("{type: sgd, lr_batch: 256}", make_parameters())->lr_batch(), 256);
  EXPECT_EQ(optimizer("sgd", make_parameters())->lr_batch(), std::nullopt);
}

TEST(OptimizerTest, RefusesOptionsThatMakeNoSense) {
  EXPECT_THROW(optimizer("{type: sgd, nesterov: true}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9]}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9, 1]}", {}), base::UserError);
}

}  // namespace
}  // namespace syncbn::train

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/optimizer.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace syncbn::train {
namespace {

std::unique_ptr<Optimizer> optimizer(const std::string& yaml, const NamedTensors& parameters) {
  config::Component<OptimizerKind> component;
  config::Faults faults;
  config::Codec<config::Component<OptimizerKind>>::read(config::parse_yaml(yaml, "test"), component,
                                                        "optimizer", faults);
  faults.throw_if_any();
  return component.make(parameters);
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

/// Five steps of ours and of libtorch's on the same gradients.
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

TEST(OptimizerTest, GoesOnFromItsStateBitForBit) {
  for (const char* yaml : {"{type: sgd, momentum: 0.9}", "{type: adamw}"}) {
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

TEST(OptimizerTest, RefusesOptionsThatMakeNoSense) {
  EXPECT_THROW(optimizer("{type: sgd, nesterov: true}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9]}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9, 1]}", {}), base::UserError);
}

}  // namespace
}  // namespace syncbn::train

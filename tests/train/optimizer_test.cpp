#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "support/thrown.h"
#include "train/optimizer_support.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

/// Compares five steps with libtorch's optimizer on the same gradients, fused and not.
template <class Theirs>
void expect_same_steps(const std::string& options,
                       const std::function<Theirs(NamedTensors)>& make) {
  std::vector<std::string> yamls = {"{" + options + "}"};
  if (!options.starts_with("type: rmsprop")) yamls.push_back("{" + options + ", fused: false}");
  for (const std::string& yaml : yamls) {
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
}

std::vector<at::Tensor> tensors(const NamedTensors& parameters) {
  return {parameters[0].second, parameters[1].second};
}

TEST(OptimizerTest, SgdStepsAsLibtorchsDoes) {
  using torch::optim::SGD;
  using torch::optim::SGDOptions;
  expect_same_steps<SGD>("type: sgd, lr: 0.1",
                         [](auto p) { return SGD(tensors(p), SGDOptions(0.1)); });
  expect_same_steps<SGD>("type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01", [](auto p) {
    return SGD(tensors(p), SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  });
  expect_same_steps<SGD>("type: sgd, lr: 0.1, momentum: 0.9, nesterov: true", [](auto p) {
    return SGD(tensors(p), SGDOptions(0.1).momentum(0.9).nesterov(true));
  });
}

TEST(OptimizerTest, AdamwStepsAsLibtorchsDoes) {
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  expect_same_steps<AdamW>("type: adamw, lr: 0.01",
                           [](auto p) { return AdamW(tensors(p), AdamWOptions(0.01)); });
  expect_same_steps<
      AdamW>("type: adamw, lr: 0.01, betas: [0.8, 0.95], eps: 0.001, weight_decay: 0.1", [](auto
                                                                                                p) {
    return AdamW(tensors(p), AdamWOptions(0.01).betas({0.8, 0.95}).eps(0.001).weight_decay(0.1));
  });
}

TEST(OptimizerTest, AdamAndRmspropStepAsLibtorchsDo) {
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  using torch::optim::RMSprop;
  using torch::optim::RMSpropOptions;
  expect_same_steps<Adam>("type: adam, lr: 0.01, weight_decay: 0.1, amsgrad: true", [](auto p) {
    return Adam(tensors(p), AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
  });
  expect_same_steps<RMSprop>(
      "type: rmsprop, lr: 0.01, momentum: 0.9, centered: true, weight_decay: 0.1", [](auto p) {
        return RMSprop(tensors(p),
                       RMSpropOptions(0.01).momentum(0.9).centered(true).weight_decay(0.1));
      });
}

/// Parameters like the filters of convolutions.
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
    // A checkpoint contains contiguous state, while these parameters are channels-last.
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
  for (const char* yaml : {"{type: adamw}", "{type: adam}", "{type: rmsprop}", "{type: lamb}",
                           "{type: sgd, weight_decay: 0.1}"}) {
    const NamedTensors parameters = make_parameters();
    parameters[0].second.mutable_grad() = sparse_rows();
    EXPECT_THAT(test::message_of<base::UserError>([&] { optimizer(yaml, parameters)->step(0.1); }),
                HasSubstr("the gradient of parameter 'weight' is sparse"))
        << yaml;
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

TEST(OptimizerTest, RefusesOptionsThatMakeNoSense) {
  EXPECT_THROW(optimizer("{type: sgd, nesterov: true}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: sgd, nesterov: true, momentum: 0.9, dampening: 0.1}", {}),
               base::UserError);
  EXPECT_THROW(optimizer("{type: lamb, max_grad_norm: 0}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9]}", {}), base::UserError);
  EXPECT_THROW(optimizer("{type: adamw, betas: [0.9, 1]}", {}), base::UserError);
}

}  // namespace
}  // namespace syncbn::train

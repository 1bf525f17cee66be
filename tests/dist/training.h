#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

namespace syncbn::test {

/// At learning rate 0.1; drops the gradients.
inline void sgd_step(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = at::Tensor();
  }
}

/// Uses one of its two layers.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    left = register_module("left", torch::nn::Linear(2, 2));
    right = register_module("right", torch::nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& input, bool use_right) {
    return use_right ? right(input) : left(input);
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

}  // namespace syncbn::test

#pragma once

#include <gtest/gtest.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "dist/tensors.h"

namespace syncbn::test {

/// A step of SGD with learning rate 0.1, which also drops the gradients.
inline void sgd_step(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = at::Tensor();
  }
}

/// Expects equal parameters, gradients and buffers.
inline void expect_same_state(const torch::nn::Module& net, const torch::nn::Module& reference,
                              double tolerance) {
  const auto expected_parameters = reference.named_parameters();
  for (const auto& item : net.named_parameters()) {
    const at::Tensor& expected = expected_parameters[item.key()];
    EXPECT_TRUE(close(item.value(), expected, tolerance, tolerance)) << item.key();
    ASSERT_EQ(item.value().grad().defined(), expected.grad().defined()) << item.key();
    if (!expected.grad().defined()) continue;
    EXPECT_TRUE(close(item.value().grad(), expected.grad(), tolerance, tolerance)) << item.key();
  }
  const auto expected_buffers = reference.named_buffers();
  for (const auto& item : net.named_buffers()) {
    EXPECT_TRUE(close(item.value(), expected_buffers[item.key()], tolerance, tolerance))
        << item.key();
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

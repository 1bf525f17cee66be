// Shared by the tests of convert_sync_batchnorm: networks of five layers, five steps, and a check
// of the number of exchanges in each step.
#pragma once

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>

#include <vector>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include "dist/device.h"
#include "dist/tensors.h"

namespace syncbn::test {

inline constexpr int kLayers = 5;
inline constexpr int kSteps = 5;

inline void sgd_step(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;  // frozen, or not used
    parameter.sub_(parameter.grad(), 0.05);
    parameter.mutable_grad() = at::Tensor();
  }
}

/// Arguments and expectations of expect_steps().
struct Steps {
  uint64_t exchanges = kLayers;  ///< in each forward, and in each backward
  std::vector<int64_t> batch = {4, 3, 6, 6};
  at::ScalarType dtype = at::kFloat;
};

/// Trains for kSteps steps, each rank with its own batches and gradients, and checks the number of
/// exchanges in each.
template <class Forward>
void expect_steps(const Forward& forward, const std::vector<at::Tensor>& parameters,
                  const Steps& steps = {}) {
  exchanges();  // makes the group
  for (int step = 0; step < kSteps; ++step) {
    uint64_t before = exchanges();
    const at::Tensor input = randn(steps.batch, steps.dtype).requires_grad_();
    const at::Tensor output = forward(input);
    EXPECT_EQ(exchanges() - before, steps.exchanges) << "forward of step " << step;
    before = exchanges();
    output.pow(2).sum().backward();
    EXPECT_EQ(exchanges() - before, steps.exchanges) << "backward of step " << step;
    sgd_step(parameters);
  }
}

/// Whether DDP has averaged the gradients over ranks, or this test has to.
enum class Gradients { kAveraged, kLocal };

inline void average_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    dist::all_reduce(parameter.mutable_grad());
    parameter.mutable_grad().div_(dist::world_size());
  }
}

/// Trains on this rank's half of each batch, and the reference on the whole batch, and compares
/// them.
template <class Forward, class ReferenceForward>
void expect_trains_as_whole_batch(Forward forward, const std::vector<at::Tensor>& parameters,
                                  ReferenceForward reference_forward,
                                  const std::vector<at::Tensor>& reference_parameters, int rank,
                                  Gradients gradients) {
  exchanges();  // makes the group
  // cuDNN chooses other algorithms for half a batch than for the whole one.
  const double atol = device().is_cuda() ? 1e-4 : 1e-5;
  at::manual_seed(11);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor batch = randn({8, 3, 6, 6});
    const at::Tensor target = randn({8, 2});
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
      ASSERT_TRUE(close(parameters[i], reference_parameters[i], 1e-4, atol))
          << "parameter " << i << " after step " << step;
    }
  }
}

}  // namespace syncbn::test

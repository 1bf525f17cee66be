// Gradients and second derivatives, compared with finite differences, over two ranks.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cmath>
#include <functional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/device.h"
#include "dist/tensors.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::on_device;
using syncbn::test::run_on_device;
using SyncBatchNormGradTest = syncbn::test::DeviceTest;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors& inputs)>;

double over_ranks(const at::Tensor& own) {
  at::Tensor sum = own.detach().cpu().clone();
  dist::all_reduce(sum);
  return sum.item<double>();
}

/// Expects the gradients of the sum over all ranks of function(inputs), a scalar, to agree with
/// central differences. Each rank's inputs change in turn, while those of the other ranks stay as
/// they are.
void expect_gradients_are_differences(const Function& function, const Tensors& inputs) {
  const at::Tensor value = function(inputs);
  const Tensors gradients = torch::autograd::grad({value}, inputs);
  const double over_all = over_ranks(value);
  constexpr double kStep = 1e-6;
  for (int rank = 0; rank < dist::world_size(); ++rank) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      // Inputs may differ in size between ranks: each rank makes as many calls as the longest
      // needs.
      at::Tensor longest = at::zeros({}, at::kLong) + inputs[i].numel();
      dist::all_reduce(longest, c10d::ReduceOp::MAX);
      at::Tensor flat = inputs[i].detach().view({-1});
      at::Tensor differences = at::zeros_like(flat);
      for (int64_t at = 0; at < longest.item<int64_t>(); ++at) {
        const bool mine = rank == dist::rank() && at < flat.numel();
        const auto moved = [&](double by) {
          if (mine) flat[at] += by;
          const double result = over_ranks(function(inputs));
          if (mine) flat[at] -= by;
          return result;
        };
        const double slope = (moved(kStep) - moved(-kStep)) / (2 * kStep);
        if (mine) differences[at] = slope;
      }
      if (rank == dist::rank()) {
        // Rounding errors of the value, which are relative to it, limit the accuracy of
        // differences.
        const double lost = 1e-13 * std::abs(over_all) / kStep;
        EXPECT_TRUE(close(gradients[i].view({-1}), differences, 1e-5, 1e-7 + lost))
            << "input " << i << " of rank " << rank;
      }
    }
  }
}

/// A float64 layer on `samples` of this rank, as a function of the input, of weight and bias if it
/// has them, and of the residual if `residual`. The weighting makes all gradients different.
struct Layer {
  explicit Layer(SyncBatchNormOptions options, int64_t samples, bool residual = false)
      : layer(options.track_running_stats(false)) {
    layer->to(device(), at::kDouble);
    at::manual_seed(5 + static_cast<uint64_t>(dist::rank()));
    const std::vector<int64_t> sizes{samples, 2, 3};
    inputs.push_back(test::randn(sizes, at::kDouble));
    weighting = test::randn(sizes, at::kDouble);
    // The parameters have to be the same on all ranks.
    at::manual_seed(3);
    if (layer->options.affine()) {
      inputs.push_back(test::randn({2}, at::kDouble) + 2);
      inputs.push_back(test::randn({2}, at::kDouble));
    }
    if (residual) inputs.push_back(test::randn(sizes, at::kDouble));
    for (at::Tensor& input : inputs) input.requires_grad_();
  }

  at::Tensor output(const Tensors& of) {
    size_t next = 1;
    if (layer->options.affine()) {
      layer->weight = of[next++];
      layer->bias = of[next++];
    }
    return layer->forward(of[0], next < of.size() ? of[next] : at::Tensor());
  }
  at::Tensor value(const Tensors& of) { return (output(of).pow(3) * weighting).sum(); }

  SyncBatchNorm layer;
  Tensors inputs;
  at::Tensor weighting;
};

void expect_gradcheck(Layer layer) {
  expect_gradients_are_differences([&](const Tensors& of) { return layer.value(of); },
                                   layer.inputs);
}

void expect_gradgradcheck(Layer layer) {
  const Function squares = [&](const Tensors& of) {
    const at::Tensor value = layer.value(of);
    at::Tensor sum = test::zeros({}, at::kDouble);
    for (const at::Tensor& gradient :
         torch::autograd::grad({value}, of, {}, true, /*create_graph=*/true)) {
      sum = sum + gradient.pow(2).sum();
    }
    return sum;
  };
  expect_gradients_are_differences(squares, layer.inputs);
}

/// A layer with samples on both ranks, one with none on rank 0, one with fused ReLU and addition,
/// and one without affine.
std::vector<Layer> layers(int rank) {
  return {Layer(SyncBatchNormOptions(2), 2 + rank),
          Layer(SyncBatchNormOptions(2), int64_t{3} * rank),
          Layer(SyncBatchNormOptions(2).fuse_relu(true), 2 + rank, true),
          Layer(SyncBatchNormOptions(2).affine(false), 2 + rank)};
}

TEST_F(SyncBatchNormGradTest, Gradcheck) {
  run_on_device(2, [](int rank) {
    for (const Layer& layer : layers(rank)) expect_gradcheck(layer);
  });
}

TEST_F(SyncBatchNormGradTest, Gradgradcheck) {
  run_on_device(2, [](int rank) {
    for (const Layer& layer : layers(rank)) expect_gradgradcheck(layer);
    expect_gradgradcheck(
        Layer(SyncBatchNormOptions(2).affine(false).fuse_relu(true), 2 + rank, true));
  });
}

/// The input's gradient of the sum of squares of its gradient, compared with libtorch's on the
/// whole batch.
TEST_F(SyncBatchNormGradTest, GradientsOfGradientsEqualBatchNormsOnTheWholeBatch) {
  run_on_device(2, [](int rank) {
    at::manual_seed(2);
    const at::Tensor whole = test::randn({6, 3, 4}, at::kDouble).requires_grad_();
    const at::Tensor weight = test::randn({3}, at::kDouble).requires_grad_();
    const at::Tensor bias = test::randn({3}, at::kDouble).requires_grad_();
    const auto twice = [&](const at::Tensor& input, const at::Tensor& output) {
      const at::Tensor gradient = torch::autograd::grad({output.pow(3).sum()}, {input}, {}, true,
                                                        /*create_graph=*/true)[0];
      return torch::autograd::grad({gradient.pow(2).sum()}, {input, weight});
    };
    const Tensors expected =
        twice(whole, at::batch_norm(whole, weight, bias, {}, {}, true, 0.1, 1e-5, false));
    SyncBatchNorm layer =
        on_device(SyncBatchNorm(SyncBatchNormOptions(3).track_running_stats(false)));
    layer->weight = weight;
    layer->bias = bias;
    const at::Tensor own =
        whole.detach().narrow(0, int64_t{4} * rank, 4 - int64_t{2} * rank).requires_grad_();
    const Tensors actual = twice(own, layer(own));
    EXPECT_TRUE(close(actual[0], expected[0].narrow(0, int64_t{4} * rank, 4 - int64_t{2} * rank),
                      1e-9, 1e-11));
    at::Tensor grad_weight = actual[1].clone();
    dist::all_reduce(grad_weight);
    EXPECT_TRUE(close(grad_weight, expected[1], 1e-9, 1e-11));
  });
}

TEST_F(SyncBatchNormGradTest, GradientsOfGradientsWorkInFloatAndHalf) {
  run_on_device(2, [](int rank) {
    at::manual_seed(static_cast<uint64_t>(rank));
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      SyncBatchNorm layer = on_device(SyncBatchNorm(3));
      const at::Tensor input = (test::randn({8, 3}) * 0.1 + 100).to(type).requires_grad_();
      SyncBatchNorm exact = on_device(SyncBatchNorm(3));
      exact->to(at::kDouble);
      const at::Tensor precise = input.detach().to(at::kDouble).requires_grad_();
      const auto penalty = [](SyncBatchNorm& of, const at::Tensor& x) {
        const at::Tensor gradient = torch::autograd::grad({of(x).pow(3).sum()}, {x}, {}, true,
                                                          /*create_graph=*/true)[0];
        return torch::autograd::grad({gradient.to(at::kDouble).pow(2).sum()}, {x})[0];
      };
      const at::Tensor expected = penalty(exact, precise);
      const at::Tensor actual = penalty(layer, input);
      EXPECT_EQ(actual.scalar_type(), type);
      const double scale = expected.abs().max().item<double>();
      // On GPUs the mean is float32, so a mean of 100 has an error of 8e-5 deviations; the loss is
      // the output's fourth power.
      const double of_float = device().is_cuda() ? 2e-3 : 1e-4;
      EXPECT_TRUE(close(actual, expected, 0, (type == at::kFloat ? of_float : 5e-2) * scale));
    }
  });
}

}  // namespace

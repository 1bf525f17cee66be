#include "step/gradients.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <syncbn/models/model.h>

#include <limits>
#include <sstream>

#include "step/ema.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::train {
namespace {

/// Two parameters with gradients, with the values of kPythonSteps.
Tensors parameters() {
  const at::Tensor weight = (at::arange(12, at::kFloat) / 10 - 0.4).view({3, 4});
  const at::Tensor bias = at::arange(4, at::kFloat) / 100;
  for (const at::Tensor& tensor : {weight, bias}) {
    tensor.requires_grad_(true);
    tensor.mutable_grad() = (tensor.detach() * 3).sin() * 2;
  }
  return {weight, bias};
}

constexpr const char* kPythonSteps = R"(
import sys, torch
def parameters():
    tensors = [(torch.arange(12.) / 10 - 0.4).view(3, 4), torch.arange(4.) / 100]
    for tensor in tensors:
        tensor.requires_grad_(True)
        tensor.grad = (tensor.detach() * 3).sin() * 2
    return tensors
def show(tensors):
    print(*torch.cat([t.detach().float().flatten() for t in tensors]).view(torch.int32).tolist())
def grads(tensors):
    show([t.grad for t in tensors])

p = parameters(); norm = torch.nn.utils.clip_grad_norm_(p, 1.5); grads(p); show([norm])
p = parameters(); torch.nn.utils.clip_grad_norm_(p, 100); grads(p)
p = parameters(); torch.nn.utils.clip_grad_value_(p, 0.5); grads(p)

# The scales and skipped steps of a scaler whose gradients overflow in some steps.
weight = torch.ones(2, requires_grad=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024., growth_factor=3., backoff_factor=0.25,
                              growth_interval=3)
optimizer = torch.optim.SGD([weight], lr=0.125)
for step in range(12):
    optimizer.zero_grad()
    factor = float("inf") if step in (2, 3, 9) else 0.5
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    show([torch.tensor([scaler.get_scale()]), weight])

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
net = torch.nn.BatchNorm1d(4)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for step in range(5):
    with torch.no_grad():
        for i, value in enumerate([net.weight, net.bias, net.running_mean, net.running_var]):
            value.copy_((torch.arange(4.) + step * (i + 1)).cos())
    average.update_parameters(net)
m = average.module
show([m.weight, m.bias, m.running_mean, m.running_var])
)";

std::string bits(const Tensors& tensors) {
  Tensors flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.detach().to(at::kFloat).flatten());
  }
  const at::Tensor all = at::cat(flat).view(at::kInt);
  std::ostringstream text;
  for (int64_t i = 0; i < all.numel(); ++i) text << (i > 0 ? " " : "") << all[i].item<int>();
  return text.str() + "\n";
}

std::string clipped() {
  Tensors tensors = parameters();
  const at::Tensor norm = clip_norm(gradients_of(tensors), 1.5);
  std::string text = bits(gradients_of(tensors)) + bits({norm});
  tensors = parameters();
  clip_norm(gradients_of(tensors), 100);
  text += bits(gradients_of(tensors));
  tensors = parameters();
  clip_value(gradients_of(tensors), 0.5);
  return text + bits(gradients_of(tensors));
}

std::string scaled() {
  std::string text;
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  GradScaler scaler(
      {.init_scale = 1024, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 3},
      at::kCPU);
  for (int step = 0; step < 12; ++step) {
    weight.mutable_grad() = at::Tensor();
    const bool overflows = step == 2 || step == 3 || step == 9;
    const double factor = overflows ? std::numeric_limits<double>::infinity() : 0.5;
    scaler.scale((weight * factor).sum()).backward();
    at::Tensor found_inf = at::zeros({});
    scaler.unscale(gradients_of({weight}), found_inf);
    if (found_inf.item<float>() == 0) weight.detach().add_(weight.grad(), -0.125);
    scaler.update(found_inf);
    text += bits({scaler.state().at("scale"), weight});
  }
  return text;
}

class Norm : public models::Model {
 public:
  Norm() {
    for (const char* name : {"weight", "bias"}) register_parameter(name, at::zeros({4}));
    for (const char* name : {"running_mean", "running_var"}) register_buffer(name, at::zeros({4}));
    register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  }
  at::Tensor forward(at::Tensor input) override { return input; }
};

std::string averaged() {
  const Norm net;
  Ema ema({.decay = 0.9}, net);
  const Tensors values = {net.named_parameters()["weight"], net.named_parameters()["bias"],
                          net.named_buffers()["running_mean"], net.named_buffers()["running_var"]};
  for (int step = 0; step < 5; ++step) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].detach().copy_((at::arange(4, at::kFloat) + step * static_cast<int>(i + 1)).cos());
    }
    // Python's first update copies.
    ema.update(step + 1, /*copies=*/step == 0);
  }
  const auto& state = ema.state();
  return bits(
      {state.at("weight"), state.at("bias"), state.at("running_mean"), state.at("running_var")});
}

TEST(GradientsTest, ClippingScalerAndAverageHavePythonsBits) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto python = test::run_program({test::python(), "-c", kPythonSteps});
  ASSERT_EQ(python.exit_code, 0) << python.err;
  EXPECT_EQ(clipped() + scaled() + averaged(), python.out);
}

TEST(GradientsTest, ClipsByTheNormOfAll) {
  const Tensors tensors = parameters();
  const double norm =
      at::cat({tensors[0].grad().flatten(), tensors[1].grad()}).norm().item<double>();
  EXPECT_NEAR(clip_norm(gradients_of(tensors), 0.5).item<double>(), norm, 1e-6);
  const at::Tensor after = at::cat({tensors[0].grad().flatten(), tensors[1].grad()}).norm();
  EXPECT_NEAR(after.item<double>(), 0.5, 1e-5);
}

TEST(GradientsTest, AdaptiveClippingLimitsEachUnitByItsWeights) {
  const Tensors tensors = parameters();
  const at::Tensor before = tensors[0].grad().clone();
  clip_adaptive(tensors, 0.1);
  const at::Tensor limit = tensors[0].detach().norm(2, {1}) * 0.1;
  EXPECT_TRUE(at::allclose(tensors[0].grad().norm(2, {1}), limit, 1e-5));
  // The direction stays the same.
  EXPECT_TRUE(at::allclose(at::cosine_similarity(tensors[0].grad(), before), at::ones({3})));
  const Tensors small = parameters();
  clip_adaptive(small, 1000);
  EXPECT_TRUE(at::equal(small[0].grad(), parameters()[0].grad())) << "within the limit";
}

TEST(EmaTest, TradesPlacesWithTheModel) {
  const Norm net;
  const at::Tensor weight = net.named_parameters()["weight"];
  Ema ema({.decay = 0.5, .every = 2}, net);
  weight.detach().fill_(4);
  ema.update(1, false);
  EXPECT_EQ(ema.state().at("weight")[0].item<float>(), 0) << "every second step";
  ema.update(2, false);
  EXPECT_EQ(ema.state().at("weight")[0].item<float>(), 2);
  {
    const Ema::InPlace averages(ema);
    EXPECT_EQ(weight[0].item<float>(), 2);
  }
  EXPECT_EQ(weight[0].item<float>(), 4);
  EXPECT_EQ(ema.state().at("weight")[0].item<float>(), 2);
}

}  // namespace
}  // namespace syncbn::train

// Errors against float64, next to those of BatchNorm on the whole batch in the same dtype.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/zeros_like.h>

#include "dist/device.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::device;
using syncbn::test::on_device;
using syncbn::test::run_on_device;
using SyncBatchNormNumericsTest = syncbn::test::DeviceTest;

struct NumericsCase {
  std::vector<int64_t> shares = {3, 5};       ///< number of samples of each rank
  std::vector<int64_t> sample = {4, 32, 32};  ///< [C, ...]
  at::ScalarType type = at::kFloat;
  double mean = 0;
  double stddev = 1;
  double drift = 0;  ///< change of the mean from one sample to the next
  double eps = 1e-5;
  bool constant_channel = false;
};

using Results = std::map<std::string, at::Tensor>;

/// BatchNorm on the whole batch, on the same device. Parameters and statistics are float32 where
/// the input is narrower.
Results whole_batch(const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight,
                    const at::Tensor& bias, double eps) {
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor w = weight.detach().clone().requires_grad_();
  const at::Tensor b = bias.detach().clone().requires_grad_();
  at::Tensor mean = at::zeros_like(w.detach());
  at::Tensor var = at::zeros_like(mean);
  const at::Tensor y = at::batch_norm(x, w, b, mean, var, true, /*momentum=*/1.0, eps, false);
  y.backward(gradient);
  return {{"mean", mean},           {"variance", var},         {"output", y.detach()},
          {"grad_input", x.grad()}, {"grad_weight", w.grad()}, {"grad_bias", b.grad()}};
}

Results over_ranks(const NumericsCase& c, const at::Tensor& input, const at::Tensor& gradient,
                   const at::Tensor& weight, const at::Tensor& bias, at::MemoryFormat format) {
  SyncBatchNorm layer(SyncBatchNormOptions(c.sample[0]).eps(c.eps).momentum(1.0));
  layer->to(device(), weight.scalar_type());
  {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(weight);
    layer->bias.copy_(bias);
  }
  const int rank = dist::rank();
  const int64_t begin = std::accumulate(c.shares.begin(), c.shares.begin() + rank, int64_t{0});
  const auto own = [&](const at::Tensor& all) {
    return all.narrow(0, begin, c.shares[static_cast<size_t>(rank)]).contiguous(format);
  };
  const at::Tensor x = own(input).clone().requires_grad_();
  const at::Tensor y = layer(x);
  y.backward(own(gradient));
  // Ranks have different numbers of samples: each fills in its own part.
  const auto whole = [&](const at::Tensor& part) {
    at::Tensor all = test::zeros(input.sizes(), at::kDouble);
    all.narrow(0, begin, part.size(0)).copy_(part);
    dist::all_reduce(all);
    return all;
  };
  const auto sum = [](const at::Tensor& part) {
    at::Tensor all = part.to(at::kDouble);
    dist::all_reduce(all);
    return all;
  };
  return {{"mean", layer->running_mean},
          {"variance", layer->running_var},
          {"output", whole(y.detach())},
          {"grad_input", whole(x.grad())},
          {"grad_weight", sum(layer->weight.grad())},
          {"grad_bias", sum(layer->bias.grad())}};
}

double relative_error(const at::Tensor& actual, const at::Tensor& exact) {
  const double largest = exact.abs().max().item<double>();
  return (actual.to(at::kDouble) - exact).abs().max().item<double>() / std::max(largest, 1e-300);
}

void expect_accurate(const NumericsCase& c, at::MemoryFormat format) {
  at::manual_seed(9);
  std::vector<int64_t> sizes{std::accumulate(c.shares.begin(), c.shares.end(), int64_t{0})};
  sizes.insert(sizes.end(), c.sample.begin(), c.sample.end());
  std::vector<int64_t> samples(sizes.size(), 1);
  samples[0] = sizes[0];
  const at::Tensor means = c.mean + c.drift * at::arange(sizes[0], at::kDouble).view(samples);
  at::Tensor input = (test::randn(sizes, at::kDouble) * c.stddev + means.to(device())).to(c.type);
  if (c.constant_channel) input.select(1, 0).fill_(3.7);
  const at::Tensor gradient = test::randn(sizes).to(c.type);
  const auto parameters = c.type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor weight = (test::randn({c.sample[0]}) + 2).to(parameters);
  const at::Tensor bias = test::randn({c.sample[0]}).to(parameters);

  const Results exact = whole_batch(input.to(at::kDouble), gradient.to(at::kDouble),
                                    weight.to(at::kDouble), bias.to(at::kDouble), c.eps);
  const Results theirs =
      whole_batch(input.contiguous(format), gradient.contiguous(format), weight, bias, c.eps);
  const Results ours = over_ranks(c, input, gradient, weight, bias, format);
  const double half_ulp = c.type == at::kFloat ? 6e-8 : c.type == at::kHalf ? 5e-4 : 4e-3;
  const double of_deviations = 6e-8 * exact.at("variance").max().sqrt().item<double>() /
                               exact.at("mean").abs().max().item<double>();
  for (const auto& [name, reference] : exact) {
    const bool in_input_type = name == "output" || name == "grad_input";
    // No result has to be more accurate than one rounding to its type. By chance BatchNorm's error
    // can be less than a quarter of that: for the mean at a tiny deviation (1e-8) and of a constant
    // channel (1e-10).
    const double rounding = in_input_type ? half_ulp : 6e-8;
    double bound = std::max(4 * relative_error(theirs.at(name), reference), rounding);
    // The GPU kernels sum 32 deviations at a time in float32, the CPU kernels sum in float64.
    if (device().is_cuda() && name == "mean") bound = std::max(bound, of_deviations);
    EXPECT_LE(relative_error(ours.at(name), reference), bound) << name;
  }
}

void expect_accurate(const NumericsCase& c) {
  run_on_device(static_cast<int>(c.shares.size()), [&](int) {
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      SCOPED_TRACE(format);
      expect_accurate(c, format);
    }
  });
}

const NumericsCase kCases[] = {
    {},
    {.mean = 1e3, .stddev = 0.1},
    {.stddev = 1e-6},
    {.mean = 1e-3, .stddev = 1e-6, .eps = 0},
    {.eps = 0},
    {.mean = 1e3, .stddev = 0.1, .eps = 0},
    {.constant_channel = true},
    {.type = at::kHalf, .constant_channel = true},
    {.drift = 100},
};

TEST_F(SyncBatchNormNumericsTest, OfLargeSmallAndConstantValues) {
  // A group of one rank uses other code.
  for (const std::vector<int64_t>& shares : {std::vector<int64_t>{3, 5}, std::vector<int64_t>{8}}) {
    for (NumericsCase c : kCases) {
      c.shares = shares;
      SCOPED_TRACE(testing::Message()
                   << shares.size() << " ranks, " << c.type << ", mean " << c.mean << ", deviation "
                   << c.stddev << ", drift " << c.drift << ", eps " << c.eps
                   << (c.constant_channel ? ", a constant channel" : ""));
      expect_accurate(c);
    }
  }
}

// The errors above are relative to the largest value, which is in another channel.
TEST_F(SyncBatchNormNumericsTest, AConstantChannelHasNoVarianceAndBecomesTheBias) {
  run_on_device(2, [](int) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(1.0)));
      {
        const at::NoGradGuard no_grad;
        layer->bias.fill_(0.5);
      }
      at::Tensor input = test::randn({4, 2, 33, 33}).to(type);
      input.select(1, 0).fill_(3.7);
      input.requires_grad_();
      const at::Tensor output = layer(input);
      output.pow(2).sum().backward();
      EXPECT_LE(layer->running_var[0].item<double>(), 1e-12);
      EXPECT_LE((output.select(1, 0) - 0.5).abs().max().item<double>(), 1e-6);
      // a sum over the channel, whose terms of 2 * 0.5 cancel except for rounding
      EXPECT_LE(input.grad().select(1, 0).abs().max().item<double>(), 1e-3);
    }
  });
}

// More values per channel than float16 can count.
TEST_F(SyncBatchNormNumericsTest, OfAMillionValuesAChannelInHalfPrecision) {
  expect_accurate({.shares = {1, 3}, .sample = {2, 512, 512}, .type = at::kHalf, .mean = 0.5});
  expect_accurate({.shares = {1, 3}, .sample = {2, 512, 512}, .type = at::kBFloat16, .mean = 0.5});
}

TEST_F(SyncBatchNormNumericsTest, OfAMillionValuesAChannelInFloat) {
  expect_accurate({.shares = {1, 3}, .sample = {2, 512, 512}, .mean = 10, .stddev = 0.5});
}

TEST_F(SyncBatchNormNumericsTest, WithAnEmptyRankAndManyRanks) {
  expect_accurate({.shares = {0, 3, 1, 4}, .sample = {4, 16, 16}, .mean = 100});
}

}  // namespace

// ATen on a fake CUDA device gives the CPU's results, for all kinds of operators and streams.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/tensors.h"
#include "fake_cuda.h"
#include "test/on_gpu.h"

namespace {

using at::Tensor;
using fake_cuda::Count;
using fake_cuda::kOnGpu;
using fake_cuda::lag;
using syncbn::test::close;
using Tensors = std::vector<Tensor>;

struct Case {
  const char* name;
  /// The results for two 6 x 8 matrices that require gradients.
  std::function<Tensors(const Tensor&, const Tensor&)> run;
};

Tensors with_gradients(const Tensor& result, const Tensors& inputs) {
  Tensors all = torch::autograd::grad({result.pow(2).sum()}, inputs);
  all.push_back(result);
  return all;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"elementwise",
       [](const Tensor& a, const Tensor& b) {
         return with_gradients(a * b + 2, {a, b});
       }},
      {"matrix product",
       [](const Tensor& a, const Tensor& b) {
         return with_gradients(a.mm(b.t()), {a, b});
       }},
      {"convolution",
       [](const Tensor& a, const Tensor& b) {
         const Tensor weight = b.narrow(0, 0, 3).reshape({3, 2, 2, 2});
         return with_gradients(at::conv2d(a.reshape({2, 2, 3, 4}), weight), {a, b});
       }},
      {"batch norm",
       [](const Tensor& a, const Tensor& b) {
         const Tensor mean = at::zeros({8}, a.options());
         const Tensor var = at::ones({8}, a.options());
         auto all = with_gradients(at::batch_norm(a, b[0], b[1], mean, var, true, 0.1, 1e-5, false),
                                   {a, b});
         all.insert(all.end(), {mean, var});
         return all;
       }},
      {"cross entropy",
       [](const Tensor& a, const Tensor& b) {
         const Tensor target = at::arange(6, a.options().dtype(at::kLong));
         return with_gradients(at::nll_loss(at::log_softmax(a + b, 1), target), {a, b});
       }},
      {"in place on views",
       [](const Tensor& a, const Tensor& b) {
         const Tensor copy = a.detach().clone();
         copy.slice(1, 2, 5).mul_(b.detach().slice(1, 0, 3));
         copy.t().select(0, 1).add_(1);
         return Tensors{copy, copy.t().contiguous(), at::cat({copy, b})};
       }},
      {"indices and masks",
       [](const Tensor& a, const Tensor& b) {
         const Tensor mask = a > 0;
         const Tensor rows = at::tensor({4, 0, 0}, a.options().dtype(at::kLong));
         Tensor copy = a.detach().clone();
         copy.index_put_({rows}, b.detach().narrow(0, 0, 3), /*accumulate=*/true);
         return Tensors{a.index({rows}),
                        b.index({mask}),
                        a.masked_select(mask),
                        mask.nonzero(),
                        a.masked_fill(mask, 2),
                        copy,
                        std::get<0>(at::_unique2(rows, true, true))};
       }},
      {"an output that grows",
       [](const Tensor& a, const Tensor& b) {
         Tensor sum = at::empty({0}, a.options());
         at::add_out(sum, a.detach(), b.detach());
         Tensor sorted = at::empty({0}, a.options());
         Tensor order = at::empty({0}, a.options().dtype(at::kLong));
         at::sort_out(sorted, order, a.detach(), 1, false);
         return Tensors{sum, sorted, order};
       }},
      {"lists of tensors",
       [](const Tensor& a, const Tensor& b) {
         Tensors values{a.detach().clone(), a.detach().clone()};
         const Tensors gradients{b.detach(), b.detach()};
         at::_foreach_mul_(values, 0.5);
         at::_fused_sgd_(values, gradients, {}, 0, 0, 0.1, 0, false, false, true);
         auto more = at::_foreach_add(values, gradients, 2);
         values.insert(values.end(), more.begin(), more.end());
         return values;
       }},
      {"types",
       [](const Tensor& a, const Tensor& b) {
         return Tensors{a.to(at::kHalf) * b.to(at::kBFloat16), a.gt(b), a.to(at::kInt) / 2,
                        a.sum().to(at::kDouble) * b};
       }},
      {"batch norm's parts",
       [](const Tensor& a, const Tensor& /*b*/) {
         return Tensors{std::get<0>(at::batch_norm_update_stats(a.detach(), {}, {}, 0.1))};
       }},
  };
  return all;
}

void expect_as_on_cpu() {
  at::manual_seed(3);
  const Tensor a = at::randn({6, 8});
  const Tensor b = at::randn({6, 8});
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto on = [&](at::Device device) {
      return c.run(a.detach().to(device).requires_grad_(), b.detach().to(device).requires_grad_());
    };
    const Tensors expected = on(at::kCPU);
    const Tensors actual = on({at::kCUDA, 1});
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i].device(), at::Device(at::kCUDA, 1));
      EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type());
      EXPECT_TRUE(close(actual[i], expected[i], 1e-5, 1e-5)) << "result " << i;
    }
  }
}

TEST(FakeOperatorsTest, GiveWhatTheCpusGive) {
  expect_as_on_cpu();
}

TEST(FakeOperatorsTest, GiveTheSameWhenStreamsLag) {
  lag("2");
  expect_as_on_cpu();
}

TEST(FakeOperatorsTest, CopiesTakeAnyLayoutTypeAndDevice) {
  lag("3");
  const Tensor host = at::arange(24, at::kFloat).view({4, 6});
  const Tensor first = host.to(at::Device(at::kCUDA, 0));
  const Tensor second = at::zeros({6, 4}, at::TensorOptions(at::kDouble).device(at::kCUDA, 1));
  second.t().copy_(first);
  EXPECT_TRUE(second.cpu().equal(host.t().to(at::kDouble)));
  const Tensor column = at::zeros({4}, kOnGpu.dtype(at::kHalf));
  column.copy_(second.select(0, 2));
  EXPECT_TRUE(column.cpu().equal(host.select(1, 2).to(at::kHalf)));
  Tensor strided = at::zeros({4, 6});
  strided.t().copy_(first.t());
  EXPECT_TRUE(strided.equal(host));
}

TEST(FakeOperatorsTest, RandomNumbersFollowTheGenerator) {
  at::manual_seed(5);
  const auto draw = [] {
    return Tensors{at::randn({50}, kOnGpu), at::dropout(at::ones({50}, kOnGpu), 0.5, true),
                   at::randperm(50, kOnGpu), at::empty({50}, kOnGpu).uniform_()};
  };
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(0);
  const Tensor state = generator.get_state();
  const Tensors first = draw();
  const Tensors second = draw();
  generator.set_state(state);
  const Tensors again = draw();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(again[i].equal(first[i])) << i;
    EXPECT_FALSE(second[i].equal(first[i])) << i;
  }
  EXPECT_NEAR(at::dropout(at::ones({10000}, kOnGpu), 0.25, true).mean().item<double>(), 1, 0.05);
}

// A GPU's operators throw for wrong shapes; wrong values make the device unusable.
TEST(FakeOperatorsTest, FailAsOnAGpu) {
  const Tensor matrix = at::ones({3, 4}, kOnGpu);
  EXPECT_THROW(matrix.mm(matrix), c10::Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  at::nll_loss(matrix, at::full({3}, 7, kOnGpu.dtype(at::kLong)));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorAssert);
}

TEST(FakeOperatorsTest, WaitOnlyWhereTheHostNeedsValues) {
  const Tensor matrix = at::randn({30, 40}, kOnGpu);
  const auto waits = [&](const auto& run) {
    const auto before = fake_cuda::counts();
    run();
    return (fake_cuda::counts() - before).host_waits();
  };
  EXPECT_EQ(waits([&] {
              at::conv2d(matrix.view({1, 1, 30, 40}), at::ones({1, 1, 3, 3}, kOnGpu));
            }),
            0U);
  EXPECT_EQ(waits([&] { std::get<0>(matrix.topk(3)).softmax(1).sum(); }), 0U);
  EXPECT_EQ(waits([&] { matrix.index({at::zeros({2}, kOnGpu.dtype(at::kLong))}); }), 0U);
  EXPECT_EQ(waits([&] { matrix.nonzero(); }), 1U);
  EXPECT_EQ(waits([&] { matrix.index({matrix > 0}); }), 1U);
  EXPECT_EQ(waits([&] { matrix.equal(matrix); }), 1U);
}

}  // namespace

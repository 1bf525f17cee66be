// Run on a machine with a GPU: ctest -L gpu. The kernels are compared with the CPU's, which other
// tests compare with float64 references.

#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include "batch_norm/batch_norm_kernels.h"
#include "dist/gpus.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
using dist::detail::batch_norm_kernels;
using dist::detail::BatchNormKernels;
using syncbn::test::close;
using syncbn::test::gpus;
using syncbn::test::run_ranks;

struct KernelCase {
  std::vector<int64_t> sizes;
  at::ScalarType type;
  bool channels_last;
  double tolerance;
};

void expect_kernels_agree(const KernelCase& c) {
  const BatchNormKernels& cpu = batch_norm_kernels(at::kCPU);
  const BatchNormKernels& cuda = batch_norm_kernels(at::kCUDA);
  at::manual_seed(1);
  at::Tensor x = (at::randn(c.sizes) * 3 + 1).to(c.type);
  at::Tensor dy = at::randn(c.sizes).to(c.type);
  if (c.channels_last) {
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    dy = dy.contiguous(at::MemoryFormat::ChannelsLast);
  }
  const int64_t channels = c.sizes[1];
  const at::Tensor weight = at::randn({channels});
  const at::Tensor bias = at::randn({channels});
  const auto on_gpu = [](const at::Tensor& t) { return t.to(at::kCUDA); };

  const auto expected = cpu.moments(x);
  const auto moments = cuda.moments(on_gpu(x));
  EXPECT_TRUE(close(moments.mean.cpu(), expected.mean, 1e-4, 1e-5));
  EXPECT_TRUE(close(moments.m2.cpu(), expected.m2, 1e-4, 1e-3));

  const double count = static_cast<double>(x.numel() / channels);
  const at::Tensor row =
      at::cat({expected.mean, expected.m2, at::full({1}, count, expected.mean.options())});
  const at::Tensor empty = at::zeros_like(row);
  const at::Tensor gathered = at::stack({row, empty, row + 0.25});
  const auto merged = cpu.merge(gathered);
  const auto merged_on_gpu = cuda.merge(on_gpu(gathered));
  EXPECT_TRUE(close(merged_on_gpu.mean.cpu(), merged.mean, 1e-12, 1e-12));
  EXPECT_TRUE(close(merged_on_gpu.m2.cpu(), merged.m2, 1e-12, 1e-12));
  EXPECT_TRUE(close(merged_on_gpu.count.cpu(), merged.count, 0, 0));

  const at::Tensor invstd = (merged.m2 / merged.count + 1e-5).rsqrt();
  EXPECT_TRUE(close(
      cuda.transform(on_gpu(x), on_gpu(weight), on_gpu(bias), on_gpu(merged.mean), on_gpu(invstd))
          .cpu(),
      cpu.transform(x, weight, bias, merged.mean, invstd), c.tolerance, c.tolerance));

  const auto sums = cpu.backward_reduce(dy, x, merged.mean, invstd);
  const auto sums_on_gpu =
      cuda.backward_reduce(on_gpu(dy), on_gpu(x), on_gpu(merged.mean), on_gpu(invstd));
  EXPECT_TRUE(close(sums_on_gpu.dy.cpu(), sums.dy, 1e-3, 1e-2));
  EXPECT_TRUE(close(sums_on_gpu.dy_xmu.cpu(), sums.dy_xmu, 1e-3, 5e-2));
  EXPECT_TRUE(
      close(cuda.backward_elementwise(on_gpu(dy), on_gpu(x), on_gpu(weight), on_gpu(merged.mean),
                                      on_gpu(invstd), {on_gpu(sums.dy), on_gpu(sums.dy_xmu)},
                                      on_gpu(merged.count))
                .cpu(),
            cpu.backward_elementwise(dy, x, weight, merged.mean, invstd, sums, merged.count),
            c.tolerance, c.tolerance));
}

TEST(GpuTest, KernelsAgreeWithTheCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    expect_kernels_agree({{8, 6, 20, 30}, at::kFloat, false, 1e-4});
    expect_kernels_agree({{8, 6, 20, 30}, at::kFloat, true, 1e-4});
    expect_kernels_agree({{8, 6, 20, 30}, at::kHalf, false, 1e-2});
    expect_kernels_agree({{8, 6, 20, 30}, at::kBFloat16, false, 5e-2});
    expect_kernels_agree({{16, 7}, at::kFloat, false, 1e-4});
    expect_kernels_agree({{4, 7, 33}, at::kFloat, false, 1e-4});
  });
}

TEST(GpuTest, AutoChoosesNcclAndTheDeviceOfTheLocalRank) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    EXPECT_EQ(dist::device(), at::Device(at::kCUDA, 0));
    at::Tensor tensor = at::full({3}, 2.0, at::TensorOptions().device(dist::device()));
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.cpu().equal(at::full({3}, 2.0)));
    at::Tensor on_cpu = at::full({3}, 2.0);
    dist::all_reduce(on_cpu);
    dist::barrier();
  });
}

TEST(GpuTest, DdpAndSyncBatchNormTrainTheSameOnTwoGpusAsOnTwoCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    namespace nn = torch::nn;
    const auto train = [rank](at::Device device) {
      at::manual_seed(0);
      nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3)),
                         dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)));
      net->to(device);
      dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
      for (int step = 0; step < 5; ++step) {
        const at::Tensor batch = at::randn({8, 3, 6, 6}).narrow(0, 4 * rank, 3 + rank);
        ddp(batch).pow(3).mean().backward();
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : net->parameters()) {
          parameter.sub_(parameter.grad(), 0.05);
        }
        ddp.zero_grad();
      }
      std::vector<at::Tensor> all = net->parameters();
      for (const at::Tensor& buffer : net->buffers()) all.push_back(buffer);
      return all;
    };
    const auto expected = train(at::kCPU);
    const auto actual = train(dist::device());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-3, 1e-4)) << i;
    }
  });
}

}  // namespace

// The CPU's kernels divide a tensor into parts that do not depend on the number of threads, so
// their results do not either.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <c10/util/StringUtil.h>

#include "batch_norm/batch_norm_cpu_walk.h"
#include "dist/group.h"
#include "support/multiproc.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::run_group;
using syncbn::test::run_ranks;

struct ThreadsCase {
  std::vector<int64_t> sizes;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  at::ScalarType type = at::kFloat;
  bool fused = false;  ///< with a residual and ReLU
};

/// The output, all gradients, and the running statistics.
std::vector<at::Tensor> results_of(const ThreadsCase& c, int threads) {
  at::set_num_threads(threads);
  SyncBatchNorm layer(SyncBatchNormOptions(c.sizes[1]).fuse_relu(c.fused));
  at::manual_seed(static_cast<uint64_t>(dist::rank()));
  const auto random = [&c] { return at::randn(c.sizes).to(c.type).contiguous(c.format); };
  const at::Tensor input = random().requires_grad_();
  const at::Tensor residual = c.fused ? random().requires_grad_() : at::Tensor();
  const at::Tensor output = layer(input, residual);
  output.backward(random());
  std::vector<at::Tensor> results{output.detach(),    input.grad(),        layer->weight.grad(),
                                  layer->bias.grad(), layer->running_mean, layer->running_var};
  if (c.fused) results.push_back(residual.grad());
  return results;
}

void expect_same_bits(const ThreadsCase& c) {
  const std::vector<at::Tensor> expected = results_of(c, 1);
  for (const int threads : {2, 5}) {
    const std::vector<at::Tensor> actual = results_of(c, threads);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(actual[i].equal(expected[i])) << "result " << i << " with " << threads;
    }
  }
}

// The kernels divide planes by channel, and rows into parts of 2^18 values. These tensors have more
// channels than threads, enough values for several threads, and three parts.
void expect_same_bits_of_all() {
  using at::MemoryFormat;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const bool fused : {false, true}) {
      SCOPED_TRACE(c10::str(type, fused ? ", fused" : ""));
      expect_same_bits({{3, 7, 64, 57}, MemoryFormat::Contiguous, type, fused});
      expect_same_bits({{2, 13, 141, 157}, MemoryFormat::ChannelsLast, type, fused});
      expect_same_bits({{150, 4099}, MemoryFormat::Contiguous, type, fused});
    }
  }
}

TEST(SyncBatchNormThreadsTest, AsManyWorkAsThereAre) {
#ifdef SYNCBN_HAVE_OPENMP
  constexpr bool kHasThreads = true;
#else
  constexpr bool kHasThreads = false;
#endif
  SYNCBN_SKIP_UNLESS(kHasThreads, "openmp");
  run_ranks(1, [](int) {
    const dist::detail::cpu::Shape shape(at::empty({3, 64, 141, 157}));
    for (const size_t threads : {3u, 1u}) {
      at::set_num_threads(static_cast<int>(threads));
      std::mutex mutex;
      std::set<std::thread::id> in_planes;
      std::set<std::thread::id> in_rows;
      const auto note = [&mutex](std::set<std::thread::id>& ids) {
        const std::lock_guard lock(mutex);
        ids.insert(std::this_thread::get_id());
      };
      dist::detail::cpu::for_planes(shape, [&](const auto&) { note(in_planes); });
      dist::detail::cpu::for_rows(shape, [&](const auto&, int64_t) { note(in_rows); });
      EXPECT_EQ(in_planes.size(), threads);
      EXPECT_EQ(in_rows.size(), threads);
    }
  });
}

TEST(SyncBatchNormThreadsTest, AnyNumberGivesTheSameBits) {
  for (const int ranks : {1, 2}) run_group(ranks, [](int) { expect_same_bits_of_all(); });
}

}  // namespace

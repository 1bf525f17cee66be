// Run on a machine with a GPU: ctest -L gpu.
#include <gtest/gtest.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>

#include <memory>
#include <utility>
#include <vector>

#include "data/noise.h"
#include "dist/gpus.h"
#include "support/multiproc.h"
#include "support/skip.h"

namespace syncbn::data {
namespace {

/// Copies all batches of an epoch to the GPU. Checks that they were in pinned memory. Does not wait
/// for copies before the loader makes the next batches: it must not reuse memory that is still
/// being copied.
void expect_pinned_and_the_same(const std::shared_ptr<const Dataset>& dataset) {
  LoaderOptions options{.batch_size = 4, .num_workers = 2};
  Loader plain(dataset, options);
  options.pin_memory = true;
  Loader pinned(dataset, options);
  for (Loader* loader : {&plain, &pinned}) loader->start_epoch(0);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // each with its expected value
  while (const auto batch = pinned.next()) {
    EXPECT_TRUE(batch->data.is_pinned());
    EXPECT_TRUE(batch->target.is_pinned());
    const auto expected = plain.next();
    const auto on_gpu = [](const at::Tensor& tensor) {
      return tensor.to(dist::device(), /*non_blocking=*/true);
    };
    copies.emplace_back(on_gpu(batch->data), expected->data);
    copies.emplace_back(on_gpu(batch->target), expected->target);
  }
  for (const auto& [copy, expected] : copies) EXPECT_TRUE(copy.cpu().equal(expected));
}

TEST(GpuLoaderTest, BatchesAreInPinnedMemoryAndUnchanged) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  test::run_ranks(1, [](int) {
    dist::init_process_group();
    expect_pinned_and_the_same(std::make_shared<test::Noise>(30));
    expect_pinned_and_the_same(
        make_synthetic({.size = 30, .channels = 1, .height = 4, .width = 4}, Split::kTrain));
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::data

// What synchronising a layer costs by number of channels: SyncBatchNorm over all ranks less
// SyncBatchNorm over each rank alone, forward and backward, by turns, on an input so small that
// computing hardly counts. A rank of syncbn-launch; rank 0 prints medians in microseconds as JSON,
// by channels, for plot_cost.py.
//
//   exchange_cost [--gloo]
#include <fmt/format.h>

#include <chrono>
#include <string>
#include <vector>

#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include "../median.h"

namespace {

using syncbn::bench::median;
namespace dist = syncbn::dist;

constexpr int kCalls = 200;

double microseconds(dist::SyncBatchNorm& layer, const at::Tensor& input) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const at::Tensor output = layer(input);
  output.backward(at::ones_like(output));
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double cost(int64_t channels) {
  dist::SyncBatchNorm together(channels);
  dist::SyncBatchNorm alone(dist::SyncBatchNormOptions(channels).group_size(1));
  const at::Tensor input = at::randn({2, channels, 2, 2}).requires_grad_();
  std::vector<double> with;
  std::vector<double> without;
  dist::barrier();
  for (int call = -5; call < kCalls; ++call) {
    const double one = microseconds(together, input);
    const double other = microseconds(alone, input);
    if (call < 0) continue;
    with.push_back(one);
    without.push_back(other);
  }
  return median(with) - median(without);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bool gloo = argc > 1 && argv[1] == std::string("--gloo");
    dist::init_process_group({.backend = "gloo", .shared_memory = !gloo});
    std::string rows;
    for (const int64_t channels : {64, 256, 1024, 2048}) {
      rows += fmt::format(R"({}"{}": {:.1f})", rows.empty() ? "" : ", ", channels, cost(channels));
    }
    if (dist::rank() == 0) fmt::print("{{{}}}\n", rows);
    dist::destroy_process_group();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "exchange_cost: {}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
}

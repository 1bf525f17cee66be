// Measures what synchronisation adds to a layer, by number of channels: the exchange and the
// merging of its forward, and the exchange of its backward, if all ranks arrive at the same time.
// Run it with syncbn-launch. Rank 0 prints medians in microseconds by channels as JSON, for
// plot_cost.py.
//
//   exchange_cost [--gloo]
#include <fmt/format.h>

#include <chrono>
#include <string>
#include <vector>

#include <ATen/ops/rand.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include "../median.h"
#include "batch_norm/batch_norm_kernels.h"
#include "batch_norm/exchange.h"
#include "groups/world.h"

namespace {

using syncbn::bench::median;
namespace dist = syncbn::dist;
namespace detail = dist::detail;

constexpr int kCalls = 1000;

double microseconds(const detail::LayerName& layer, const at::Tensor& moments,
                    const at::Tensor& sums) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const int64_t channels = sums.numel() / 2;
  const detail::Exchange exchange(layer, channels, at::kFloat, detail::statistics_group({}), {});
  const at::Tensor rows = exchange.moments(moments);
  // A single rank does not merge.
  if (exchange.ranks() > 1) detail::batch_norm_kernels(at::kCPU).merge(rows, channels, /*eps=*/0);
  exchange.sums(sums);
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double cost(int64_t channels) {
  const detail::LayerName layer;
  const at::Tensor moments = at::rand({2 * channels + 1}, at::kDouble);
  const at::Tensor sums = at::rand({2 * channels}, at::kDouble);
  std::vector<double> times;
  dist::barrier();
  for (int call = -20; call < kCalls; ++call) {
    const double time = microseconds(layer, moments, sums);
    if (call >= 0) times.push_back(time);
  }
  return median(times);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bool gloo = argc > 1 && argv[1] == std::string("--gloo");
    dist::init_process_group({.backend = "gloo", .shared_memory = !gloo});
    std::string rows;
    for (const int64_t channels : {64, 256, 1024, 2048}) {
      rows += fmt::format(R"({}"{}": {:.2f})", rows.empty() ? "" : ", ", channels, cost(channels));
    }
    if (dist::rank() == 0) fmt::print("{{{}}}\n", rows);
    dist::destroy_process_group();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "exchange_cost: {}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
}

// Measures what synchronising a layer over several hosts costs, forward and backward: with rows
// merged up a tree, and with rows sent around a ring, for comparison. measure_tree.py starts the
// ranks. Rank 0 prints medians in seconds as JSON, including those of a message between the first
// and the last rank, and of one exchange (forward or backward) within a host.
//
//   tree_cost CHANNELS CALLS RANKS_OF_A_HOST
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
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

constexpr int64_t kHeader = 3;  ///< columns of a row besides its values
constexpr int kMessages = 20;

/// Median seconds of a call, after one to warm up.
double time_of(int calls, const std::function<void()>& body) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int call = -1; call < calls; ++call) {
    const auto begin = Clock::now();
    body();
    if (call < 0) continue;
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return median(times);
}

void exchange(const dist::ProcessGroupPtr& group, int64_t channels) {
  static const detail::LayerName layer;
  const detail::Exchange exchange(layer, channels, at::kFloat, group, {});
  const at::Tensor rows = exchange.moments(at::rand({2 * channels + 1}, at::kDouble));
  detail::batch_norm_kernels(at::kCPU).merge(rows, channels, /*eps=*/0);
  exchange.sums(at::rand({2 * channels}, at::kDouble));
}

void exchange_around_a_ring(const dist::ProcessGroupPtr& group, int64_t channels) {
  at::Tensor row = at::rand({1, 2 * channels + 1 + kHeader}, at::kDouble);
  at::Tensor rows = at::empty({group->getSize(), row.size(1)}, at::kDouble);
  group->_allgather_base(rows, row)->wait();
  detail::batch_norm_kernels(at::kCPU).merge(rows, channels, /*eps=*/0);
  std::vector<at::Tensor> sums{at::rand({2 * channels + kHeader}, at::kDouble)};
  group->allreduce(sums)->wait();
}

/// Half of the time that a row takes from the first rank to the last and back.
double message(int64_t channels) {
  const int last = dist::world_size() - 1;
  if (dist::rank() != 0 && dist::rank() != last) return 0;
  const int peer = dist::rank() == 0 ? last : 0;
  const at::Tensor row = at::rand({2 * channels}, at::kDouble);
  at::Tensor received = at::empty_like(row);
  // Gloo sends a row once it knows that the peer expects it.
  std::vector<dist::WorkPtr> expected;
  for (int i = -1; i < kMessages; ++i) expected.push_back(dist::irecv(received, peer));
  auto next = expected.begin();
  return time_of(kMessages,
                 [&] {
                   if (dist::rank() == 0) dist::send(row, peer);
                   (*next++)->wait();
                   if (dist::rank() != 0) dist::send(row, peer);
                 }) /
         2;
}

void measure(int64_t channels, int calls, int ranks_of_a_host) {
  const auto all = detail::statistics_group({});
  dist::ProcessGroupPtr host;  // null: one rank per host, which exchanges nothing
  if (ranks_of_a_host > 1) host = dist::new_subgroups(ranks_of_a_host);
  const double one_message = message(channels);
  dist::barrier();
  const double within = time_of(calls, [&] { exchange(host, channels); }) / 2;
  dist::barrier();
  const double tree = time_of(calls, [&] { exchange(all, channels); });
  const double ring = time_of(calls, [&] { exchange_around_a_ring(all, channels); });
  if (dist::rank() != 0) return;
  fmt::print(R"({{"message": {}, "within": {}, "tree": {}, "ring": {}}})"
             "\n",
             one_message, within, tree, ring);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw syncbn::base::UserError("tree_cost CHANNELS CALLS RANKS_OF_A_HOST");
    dist::init_process_group({.backend = "gloo"});
    measure(std::stoll(argv[1]), std::stoi(argv[2]), std::stoi(argv[3]));
    dist::destroy_process_group();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tree_cost: {}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
}

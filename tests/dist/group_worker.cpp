// One rank of a job that tests start: creates the default group as its arguments say, runs the
// collectives in it and prints the results in the same words as group_worker.py.
//   group_worker [init_method]
// CPP_RANKS: the ranks that run this program, if others run Python's.
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "groups/world.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;

double first(const at::Tensor& tensor) {
  return tensor.flatten()[0].item<double>();
}

/// The error of a request that cannot be fulfilled.
template <class Ask>
std::string answer_to(Ask ask) {
  try {
    ask();
  } catch (const syncbn::base::UserError& error) {
    return error.what();
  }
  return "nothing";
}

/// Trains with join(): ranks have input for one or for two steps.
int64_t batches_of_joined_ranks(const dist::ProcessGroupPtr& ours,
                                const dist::ProcessGroupPtr& for_layers) {
  nn::Sequential net(nn::Linear(3, 3),
                     dist::SyncBatchNorm(dist::SyncBatchNormOptions(3).process_group(for_layers)));
  dist::DistributedDataParallel<nn::SequentialImpl> ddp(net, {.process_group = ours});
  {
    auto guard = ddp.join();
    for (int step = 0; step <= dist::rank(ours); ++step) {
      ddp(at::full({2, 3}, 1.0)).sum().backward();
    }
  }
  return net[1]->as<dist::SyncBatchNorm>()->num_batches_tracked.item<int64_t>();
}

/// Prints the errors in a job with Python's ranks, and works in a group of the other ranks.
void work_beside_python(const std::string& cpp_ranks) {
  fmt::print("statistics: {}\n", answer_to([] { dist::detail::statistics_group({}); }));
  fmt::print("unsorted: {}\n", answer_to([] { dist::new_group({dist::world_size() - 1, 0}); }));
  std::istringstream words(cpp_ranks);
  const std::vector<int> ranks{std::istream_iterator<int>(words), {}};
  const auto ours = dist::new_group(ranks);
  at::Tensor sum = at::full({1}, dist::rank() + 1.0);
  dist::all_reduce(sum, c10d::ReduceOp::SUM, ours);
  const bool usable = dist::detail::statistics_group(ours) == ours;
  fmt::print("ours: {:.0f}, statistics {}\n", first(sum), usable);
  fmt::print("joined: {} batches\n", batches_of_joined_ranks(ours, dist::new_group(ranks)));
  const int64_t channels = 3 + dist::rank(ours);
  dist::SyncBatchNorm layer(dist::SyncBatchNormOptions(channels).process_group(ours).name("bn"));
  fmt::print("layers: {}\n", answer_to([&] { layer(at::full({2, channels}, 1.0)); }));
}

void work(const dist::InitOptions& options) {
  dist::init_process_group(options);
  const int rank = dist::rank();
  const int world_size = dist::world_size();
  at::Tensor sum = at::full({5}, rank + 1.0);
  dist::all_reduce(sum);
  at::Tensor sent = at::full({2, 2}, 10.0 * rank);
  dist::broadcast(sent, world_size - 1);
  std::string gathered;
  for (const at::Tensor& one : dist::all_gather(at::full({3}, static_cast<double>(rank)))) {
    gathered += fmt::format(" {:.0f}", first(one));
  }
  dist::barrier();
  // The first and the last rank, one of which may be Python's.
  at::Tensor outer = at::full({1}, rank + 1.0);
  if (const auto group = dist::new_group({0, world_size - 1})) {
    dist::all_reduce(outer, c10d::ReduceOp::SUM, group);
  }
  fmt::print("rank {}: sum {:.0f}, sent {:.0f}, gathered{}, outer {:.0f}\n", rank, first(sum),
             first(sent), gathered, first(outer));
  const bool shares = dist::detail::backend_of(dist::default_group())->shares_memory();
  fmt::print("through {}\n", shares ? "shared memory" : "Gloo");
  const char* cpp_ranks = std::getenv("CPP_RANKS");
  if (cpp_ranks != nullptr) work_beside_python(cpp_ranks);
  dist::barrier();
  dist::destroy_process_group();
  if (cpp_ranks == nullptr) return;
  fmt::print("again: {}\n", answer_to([&] { dist::init_process_group(options); }));
}

}  // namespace

int main(int argc, char** argv) {
  dist::InitOptions options{.backend = "cpu:gloo", .connect_timeout = std::chrono::seconds(60)};
  if (argc > 1) options.init_method = argv[1];
  try {
    work(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
  return 0;
}

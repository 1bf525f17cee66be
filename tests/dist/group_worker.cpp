// One rank of a job that tests start: forms the default group as its arguments say, takes it
// through the collectives and says what came out, word for word as group_worker.py does.
//   group_worker [init_method] [interface]
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <cstdio>
#include <cstdlib>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "world.h"

namespace {

namespace dist = syncbn::dist;

double first(const at::Tensor& tensor) {
  return tensor.flatten()[0].item<double>();
}

/// What SyncBatchNorm answers in such a job.
std::string statistics() {
  try {
    return dist::detail::statistics_group({}) ? "a group" : "no group";
  } catch (const syncbn::base::UserError& error) {
    return error.what();
  }
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
  // The outer ranks, one of which may be Python's.
  at::Tensor outer = at::full({1}, rank + 1.0);
  if (const auto group = dist::new_group({0, world_size - 1})) {
    dist::all_reduce(outer, c10d::ReduceOp::SUM, group);
  }
  fmt::print("rank {}: sum {:.0f}, sent {:.0f}, gathered{}, outer {:.0f}\n", rank, first(sum),
             first(sent), gathered, first(outer));
  if (!dist::detail::all_ranks_are_ours({})) fmt::print("statistics: {}\n", statistics());
  std::fflush(stdout);
  dist::barrier();
  dist::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  dist::InitOptions options{.backend = "cpu:gloo", .connect_timeout = std::chrono::seconds(60)};
  if (argc > 1) options.init_method = argv[1];
  if (argc > 2) options.interface = argv[2];
  if (const char* rank = std::getenv("WORKER_RANK")) options.rank = std::atoi(rank);
  try {
    work(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
  return 0;
}

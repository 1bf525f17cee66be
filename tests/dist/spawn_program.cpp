// A program that spawns two ranks of one of its functions. With exec, it has a second thread and a
// process group of c10d, neither of which survives a fork.
//   spawn_program fork|exec FUNCTION [tcp://host:port NODE]
#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/spawn.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

namespace {

namespace base = syncbn::base;
namespace dist = syncbn::dist;

constexpr int kRanks = 2;

std::vector<std::string> arguments;  // the ranks of exec parse them again

const dist::SpawnFunction kSum("sum", [](int rank) {
  dist::InitOptions options;
  if (arguments.size() == 4) {
    const int node = std::stoi(arguments[3]);
    options = {.init_method = arguments[2], .rank = node * kRanks + rank, .world_size = 2 * kRanks};
  }
  dist::init_process_group(options);
  at::Tensor tensor = at::ones({2}) * (dist::rank() + 1);
  dist::all_reduce(tensor);
  fmt::print("rank {} of {}, local rank {}: sum {}\n", dist::rank(), dist::world_size(),
             dist::local_rank(), tensor[0].item<double>());
});

const dist::SpawnFunction kEnvironment("environment", [](int rank) {
  fmt::print("rank {}: OMP_NUM_THREADS={}, {} inherited, {}\n", rank,
             base::env("OMP_NUM_THREADS").value_or(""), base::env("INHERITED").value_or("not"),
             base::env("SYNCBN_SPAWNED") ? "spawned" : "not spawned");
});

const dist::SpawnFunction kFails("fails", [](int rank) {
  if (rank == 1) throw base::UserError("no data for rank 1");
  for (;;) ::pause();
});

const dist::SpawnFunction kKilled("killed", [](int rank) {
  if (rank == 1) ::raise(SIGKILL);
  for (;;) ::pause();
});

const dist::SpawnFunction kWaits("waits", [](int) {
  fmt::print("{}\n", ::getpid());
  std::fflush(nullptr);
  for (;;) ::pause();
});

}  // namespace

int main(int argc, char** argv) {
  arguments.assign(argv + 1, argv + argc);
  dist::run_spawned_rank();
  return base::run_main("spawn_program", [&] {
    if (arguments.at(0) == "fork") {
      dist::spawn(arguments.at(1), kRanks);
      return 0;
    }
    std::thread thread([] { ::pause(); });
    thread.detach();
    dist::init_process_group();
    dist::spawn(arguments.at(1), kRanks, {.start_method = dist::StartMethod::kExec});
    return 0;
  });
}

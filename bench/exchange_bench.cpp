// Compares an all-reduce through shared memory with one over Gloo: SyncBatchNorm's 2 C + 1 numbers,
// and 100 MB of gradients. Takes turns, so that a change in the machine's speed affects both. Run
// it with syncbn-launch, on as many cores as ranks.
#include <fmt/format.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <ATen/ops/zeros.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include "median.h"

namespace {

using syncbn::bench::median;
namespace dist = syncbn::dist;
using Clock = std::chrono::steady_clock;

constexpr int kTurns = 5;
constexpr int64_t kGradients = 25'000'000;

/// Seconds of each call.
std::vector<double> time_all_reduces(int64_t elements, int calls) {
  at::Tensor tensor = at::zeros({elements});  // sums stay zero
  for (int warm_up = 0; warm_up < 2; ++warm_up) dist::all_reduce(tensor);
  std::vector<double> times;
  for (int call = 0; call < calls; ++call) {
    const auto begin = Clock::now();
    dist::all_reduce(tensor);
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return times;
}

/// Seconds by number of elements.
using Times = std::map<int64_t, std::vector<double>>;

void measure(bool shared, Times& times) {
  dist::init_process_group({.backend = "gloo", .shared_memory = shared});
  for (const int64_t channels : {64, 128, 256, 512, 1024, 2048}) {
    const auto more = time_all_reduces(2 * channels + 1, 400);
    auto& all = times[2 * channels + 1];
    all.insert(all.end(), more.begin(), more.end());
  }
  const auto more = time_all_reduces(kGradients, 3);
  times[kGradients].insert(times[kGradients].end(), more.begin(), more.end());
  dist::barrier();
  dist::destroy_process_group();
}

double bandwidth(const Times& times) {
  return kGradients * sizeof(float) / median(times.at(kGradients)) / 1e9;
}

/// Prints the medians for bench/syncbn/run.py.
void report_json(const Times& shared, const Times& gloo) {
  std::string rows;
  for (const auto& [elements, times] : shared) {
    if (elements == kGradients) continue;
    rows += fmt::format(R"({}"{}": [{:.2f}, {:.2f}])", rows.empty() ? "" : ", ", elements,
                        median(times) * 1e6, median(gloo.at(elements)) * 1e6);
  }
  fmt::print(R"({{"microseconds": {{{}}}, "gb_per_s": [{:.3f}, {:.3f}]}})"
             "\n",
             rows, bandwidth(shared), bandwidth(gloo));
}

void report(const Times& shared, const Times& gloo) {
  fmt::print("{:>12} {:>14} {:>14} {:>8}\n", "floats", "shared, us", "Gloo, us", "ratio");
  for (const auto& [elements, times] : shared) {
    const double ours = median(times) * 1e6;
    const double theirs = median(gloo.at(elements)) * 1e6;
    fmt::print("{:>12} {:>14.1f} {:>14.1f} {:>8.1f}\n", elements, ours, theirs, theirs / ours);
  }
  fmt::print("100 MB: {:.2f} GB/s through shared memory, {:.2f} GB/s over Gloo\n",
             bandwidth(shared), bandwidth(gloo));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    dist::init_process_group({.backend = "gloo"});
    const int rank = dist::rank();
    const int ranks = dist::world_size();
    dist::destroy_process_group();
    if (ranks == 1) {
      fmt::print("one rank has nothing to exchange; start more with syncbn-launch\n");
      return 0;
    }
    Times shared;
    Times gloo;
    for (int turn = 0; turn < kTurns; ++turn) {
      measure(true, shared);
      measure(false, gloo);
    }
    if (rank == 0) {
      const bool json = argc > 1 && argv[1] == std::string("--json");
      (json ? report_json : report)(shared, gloo);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "exchange_bench: {}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
}

// Times an asynchronous all-reduce of 25 MiB beside a matrix product, on one thread per rank:
//
//     syncbn-launch --standalone --nproc_per_node=2 --prefix=off build/bench/overlap [PAIRS]
//
// For products of several sizes, prints the time of both together over that of the longer one
// alone: medians over rounds in which each takes its turn.
#include <syncbn/base/log.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>

#include "../median.h"

namespace {

namespace dist = syncbn::dist;

template <class Body>
double milliseconds_of(const Body& body) {
  dist::barrier();
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

int run(int rounds) {
  at::set_num_threads(1);
  dist::init_process_group();
  at::Tensor gradients = at::ones({25 << 18});
  for (const int64_t size : {1024, 2048, 3072}) {
    const at::Tensor matrix = at::rand({size, size});
    at::Tensor product = at::mm(matrix, matrix);
    std::vector<double> products, reductions, both, ratios;
    for (int round = -1; round < rounds; ++round) {  // the first one warms up
      const double one = milliseconds_of([&] { at::mm_out(product, matrix, matrix); });
      const double other = milliseconds_of([&] { dist::all_reduce(gradients); });
      const double together = milliseconds_of([&] {
        const dist::WorkPtr work = dist::all_reduce_async(gradients);
        at::mm_out(product, matrix, matrix);
        work->wait();
      });
      gradients.fill_(1);
      if (round < 0) continue;
      products.push_back(one);
      reductions.push_back(other);
      both.push_back(together);
      ratios.push_back(together / std::max(one, other));
    }
    if (dist::rank() != 0) continue;
    using syncbn::bench::median;
    std::printf(
        "product of %lld x %lld %.1f ms, all-reduce %.1f ms, both %.1f ms: %.2f of the longer\n",
        static_cast<long long>(size), static_cast<long long>(size), median(products),
        median(reductions), median(both), median(ratios));
  }
  dist::destroy_process_group();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return syncbn::base::run_main("overlap", [&] { return run(argc > 1 ? std::stoi(argv[1]) : 15); });
}

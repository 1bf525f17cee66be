// A rank that ends in its first two attempts, with FAILS=<rank>: in the middle of the job, and
// before it arrives. restart_worker.py does the same.
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include <ATen/ops/ones.h>

namespace dist = syncbn::dist;

int main() {
  try {
    const bool fails = std::getenv("FAILS") == std::string(std::getenv("RANK"));
    const int attempt = fails ? std::atoi(std::getenv("TORCHELASTIC_RESTART_COUNT")) : 2;
    if (attempt == 1) std::_Exit(8);
    dist::init_process_group();
    at::Tensor sum = at::ones({3});
    dist::all_reduce(sum);
    if (attempt == 0) std::_Exit(7);
    dist::all_reduce(sum);
    std::printf("rank %d: sum %.0f\n", dist::rank(), sum[0].item<float>());
    dist::destroy_process_group();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
  return 0;
}

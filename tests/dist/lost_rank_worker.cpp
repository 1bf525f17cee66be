// A rank of the job that peer_monitor_test starts with the launcher. SIGKILL ends rank 1 between
// two sums; the others exit with the code of the error that they get.
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include <ATen/ops/ones.h>

int main() {
  namespace dist = syncbn::dist;
  try {
    dist::init_process_group();
    at::Tensor sum = at::ones({4});
    dist::all_reduce(sum);
    if (dist::rank() == 1) ::raise(SIGKILL);
    dist::all_reduce(sum);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
  return 0;
}

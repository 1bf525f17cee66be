// A rank of the jobs that hang_test starts with the launcher. The argument is what goes wrong:
//   crossed  rank 0 waits in one group, and rank 1 in another
//   skips    the last rank does not make a call that all others make
//   sleeps   the last rank does not arrive
//   slow     the last rank takes much longer than the others between two calls
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>

namespace {

namespace dist = syncbn::dist;

/// The sum, on the GPU if ranks have one.
at::Tensor sum_over(const dist::GroupOrDefault& group) {
  at::Tensor sum = at::ones({4}, dist::device());
  dist::all_reduce(sum, c10d::ReduceOp::SUM, group);
  return sum;
}

void go_wrong(const std::string& how) {
  std::vector<int> all(static_cast<size_t>(dist::world_size()));
  std::iota(all.begin(), all.end(), 0);
  const auto group = dist::new_group(all);
  sum_over({});
  const bool is_last = dist::rank() == dist::world_size() - 1;
  if (how == "crossed") {
    sum_over(is_last ? dist::GroupOrDefault(group) : dist::GroupOrDefault());
    sum_over(is_last ? dist::GroupOrDefault() : dist::GroupOrDefault(group));
  } else if (how == "skips") {
    if (!is_last) sum_over({});
    sum_over(group);
  } else if (how == "slow") {
    for (;;) {
      ::usleep(is_last ? 60'000 : 2'000);
      static_cast<void>(
          sum_over({})[0].item());  // the host waits, as a training loop does that reads a loss
    }
  } else if (how == "sleeps") {
    if (is_last) ::sleep(1000);
    sum_over(group);
  }
}

}  // namespace

int main(int /*argc*/, char** argv) {
  try {
    dist::init_process_group();
    go_wrong(argv[1]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return syncbn::base::exit_code_of(error);
  }
  return 0;
}

// A ring all-reduce built from isend and recv, as in PyTorch's tutorial "Writing Distributed
// Applications" (custom ring-allreduce). ring.h has the algorithm; this program runs it and
// compares the result with dist::all_reduce(). Use that function in your own programs: it goes
// through shared memory or divides the tensor into chunks, and moves far fewer bytes.
//
//     syncbn-launch --standalone --nproc_per_node=4 --prefix=off ring_all_reduce
#include <syncbn/base/log.h>

#include <cstdio>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include "ring.h"

namespace dist = syncbn::dist;

namespace {

int run() {
  dist::init_process_group();
  // Rank 0 has 1 to 4, rank 1 has 5 to 8, and so on. These sums are exact in any order.
  const at::Tensor own = at::arange(1.0, 5.0) + 4.0 * dist::rank();
  at::Tensor sum = at::zeros_like(own);
  ring_all_reduce::all_reduce(own, sum);

  at::Tensor expected = own.clone();
  dist::all_reduce(expected);
  const bool is_equal = sum.equal(expected);
  if (dist::rank() == 0) {
    std::printf("sum over %d ranks: %g %g %g %g, %s dist::all_reduce\n", dist::world_size(),
                sum[0].item<double>(), sum[1].item<double>(), sum[2].item<double>(),
                sum[3].item<double>(), is_equal ? "as by" : "unlike");
  }
  dist::destroy_process_group();
  return is_equal ? 0 : 1;
}

}  // namespace

// Turns an error into one message and its exit code.
int main() {
  return syncbn::base::run_main("ring_all_reduce", run);
}

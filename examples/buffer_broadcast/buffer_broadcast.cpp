// Shows that broadcast_buffers does not synchronise batch normalisation: docs/buffers.md.
//
//     syncbn-launch --standalone --nproc_per_node=2 --prefix=off buffer_broadcast
#include <cstdio>

#include "experiment.h"

namespace dist = syncbn::dist;
using namespace buffer_broadcast;

namespace {

/// Rank 0 prints the values of all ranks, one line per rank.
void print_on_ranks(const char* what, const at::Tensor& values) {
  const std::vector<at::Tensor> everyones = dist::all_gather(values);
  if (dist::rank() > 0) return;
  for (size_t rank = 0; rank < everyones.size(); ++rank) {
    std::printf("  %-29srank %zu", rank == 0 ? what : "", rank);
    for (int64_t i = 0; i < everyones[rank].numel(); ++i) {
      std::printf("%9.4f", everyones[rank][i].item<double>());
    }
    std::printf("\n");
  }
}

void print_title(const char* title) {
  if (dist::rank() == 0) std::printf("%s\n", title);
}

void print(const Moments& moments) {
  print_on_ranks("mean of the first batch", moments.batch_mean);
  print_on_ranks("inside the first forward", moments.inside_first);
  print_on_ranks("after the first forward", moments.after_first);
  print_on_ranks("after backward", moments.after_backward);
  print_on_ranks("inside the second forward", moments.inside_second);
  print_on_ranks("after the second forward", moments.after_second);
}

}  // namespace

int main() {
  dist::init_process_group();
  print_title("broadcast_buffers = true");
  print(run(BatchNorm::kLocal, true));
  print_title("broadcast_buffers = false");
  print(run(BatchNorm::kLocal, false));
  print_title("SyncBatchNorm, broadcast_buffers = true");
  print(run(BatchNorm::kSynchronised, true));
  const bool same = gradient(/*unused_forward=*/true).equal(gradient(/*unused_forward=*/false));
  print_title(same ? "an unused forward before the backward: works"
                   : "an unused forward before the backward: other gradients");
  dist::destroy_process_group();
}

#pragma once

#include <syncbn/base/gpus.h>
#include <unistd.h>

#include "groups/cuda_support.h"
#include "support/multiproc.h"

namespace syncbn::test {

/// Counted in a process of its own: a process that has initialised CUDA cannot fork ranks. Loads
/// libtorch's CUDA part, for the ranks too: tests link none, and a group over Gloo loads none.
inline int gpus() {
  // Loading libtorch's CUDA part takes seconds.
  if (base::count_gpus() == 0) return 0;
  const auto* const cuda = dist::detail::cuda_support();
  if (cuda == nullptr) return 0;
  const auto counted =
      run_ranks_and_collect({.world_size = 1}, [cuda](int) { ::_exit(cuda->device_count()); });
  return counted[0].exit_code;
}

}  // namespace syncbn::test

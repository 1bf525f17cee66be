#pragma once

#include <syncbn/base/gpus.h>
#include <unistd.h>

#include "groups/cuda_support.h"
#include "support/multiproc.h"

namespace syncbn::test {

/// The number of GPUs, which a forked process counts: a process that has initialised CUDA cannot
/// fork ranks. Loads libtorch's CUDA part here for the ranks as well: the tests do not link it, and
/// a group over Gloo does not load it.
inline int gpus() {
  // Do not load libtorch's CUDA part, which takes seconds, where there is no GPU.
  if (base::count_gpus() == 0) return 0;
  const auto* const cuda = dist::detail::cuda_support();
  if (cuda == nullptr) return 0;
  const auto counted =
      run_ranks_and_collect({.world_size = 1}, [cuda](int) { ::_exit(cuda->device_count()); });
  return counted[0].exit_code;
}

}  // namespace syncbn::test

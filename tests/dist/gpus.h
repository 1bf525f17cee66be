#pragma once

#include <unistd.h>

#include "groups/cuda_support.h"
#include "support/multiproc.h"

namespace syncbn::test {

/// Counted in a process of its own: a process that has initialised CUDA cannot fork ranks.
inline int gpus() {
  const auto counted = run_ranks_and_collect({.world_size = 1}, [](int) {
    const auto* cuda = dist::detail::cuda_support();
    ::_exit(cuda != nullptr ? cuda->device_count() : 0);
  });
  return counted[0].exit_code;
}

}  // namespace syncbn::test

#pragma once

#include <syncbn/dist/process_group.h>

#include <functional>
#include <vector>

#include "support/multiproc.h"

namespace syncbn::test {

/// Like run_ranks(), with ranks that have formed the default group.
inline void run_group(int world_size, const dist::InitOptions& options,
                      const std::function<void(int rank)>& body, double timeout_seconds = 200) {
  const auto in_group = [&](int rank) {
    dist::init_process_group(options);
    body(rank);
  };
  run_ranks(world_size, in_group, timeout_seconds);
}

inline void run_group(int world_size, const std::function<void(int rank)>& body,
                      double timeout_seconds = 200) {
  run_group(world_size, dist::InitOptions{}, body, timeout_seconds);
}

/// Like run_ranks_and_collect(), with ranks that have formed the default group.
inline std::vector<RankResult> run_group_and_collect(int world_size,
                                                     const dist::InitOptions& options,
                                                     const std::function<void(int rank)>& body) {
  return run_ranks_and_collect({.world_size = world_size}, [&](int rank) {
    dist::init_process_group(options);
    body(rank);
  });
}

inline std::vector<RankResult> run_group_and_collect(int world_size,
                                                     const std::function<void(int rank)>& body) {
  return run_group_and_collect(world_size, dist::InitOptions{}, body);
}

}  // namespace syncbn::test

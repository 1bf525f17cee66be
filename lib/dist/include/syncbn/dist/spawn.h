#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <functional>
#include <string>

namespace syncbn::dist {

struct SpawnOptions {
  /// Grace period between SIGTERM and SIGKILL to the other ranks after the first failure.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// The first failure of a spawned rank, with its exception's message or its exit status.
class SpawnError : public base::Error {
 public:
  /// @param exit_code the rank's; 128 + N if signal N ended it
  SpawnError(int rank, int exit_code, const std::string& message)
      : Error(message, exit_code), rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Runs `fn(rank)` in `nprocs` processes forked from this one, and waits for all of them. Twin of
/// torch.multiprocessing.spawn. Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
/// (127.0.0.1) and a free MASTER_PORT in their environment, so that init_process_group() works, and
/// OMP_NUM_THREADS to a rank's share of the cores, unless it is set. A rank ends when `fn` returns,
/// without static destructors. All ranks end when this process ends in any way, and on Ctrl-C.
/// @throws SpawnError for the first rank that failed, after the others have ended.
/// @throws base::UserError when this process has other threads, uses CUDA, or is in a process group
///   already, since a forked copy would hang or fail; base::UnavailableError when the system cannot
///   start another process.
void spawn(const std::function<void(int rank)>& fn, int nprocs, const SpawnOptions& options = {});

}  // namespace syncbn::dist

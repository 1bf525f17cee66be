#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <functional>
#include <string>

namespace syncbn::dist {

struct SpawnOptions {
  /// After the first failure, between SIGTERM and SIGKILL to the ranks that still run.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// The first failure of a spawned rank: its exception's message, or what ended it.
class SpawnError : public base::Error {
 public:
  /// @param exit_code the rank's own; 128 + N when signal N ended it.
  SpawnError(int rank, int exit_code, const std::string& message)
      : Error(message, exit_code), rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Starts ranks from within a program: runs `fn(rank)` in `nprocs` processes, forked from this one
/// at this point, and waits for all of them. Twin of torch.multiprocessing.spawn. Each finds RANK,
/// LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1) and a free MASTER_PORT in its
/// environment, so that init_process_group() works, and takes its share of the cores as
/// OMP_NUM_THREADS, unless that is set. A rank ends where `fn` returns: static destructors do not
/// run. All ranks end when this process does, in whatever way, and by Ctrl-C. Blocks; call it from
/// the one thread there is.
/// @throws SpawnError for the first rank that failed; the others have been ended by then.
/// @throws base::UserError when this process has other threads, uses CUDA, or is in a process group
///   already: a forked copy would hang, or fail. base::UnavailableError when the system has no room
///   for a process.
void spawn(const std::function<void(int rank)>& fn, int nprocs, const SpawnOptions& options = {});

}  // namespace syncbn::dist

#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

struct SpawnOptions {
  /// Grace period between SIGTERM and SIGKILL to the other ranks after the first failure.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Wait for the ranks. False: return at once, and wait in SpawnContext::join().
  bool join = true;
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

/// The ranks that spawn() started. The destructor kills those that still run. Not thread-safe.
class SpawnContext {
 public:
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;
  ~SpawnContext();

  /// Waits until all ranks have ended, or for `timeout`. If one fails, the others are ended.
  /// @return whether all have ended
  /// @throws SpawnError for the first rank that failed, once the others have ended
  bool join(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  /// The processes, by rank. Those that have ended may be other processes by now.
  std::vector<int> pids() const;

 private:
  friend SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                            const SpawnOptions& options);
  struct State;
  explicit SpawnContext(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

/// Runs `fn(rank)` in `nprocs` processes forked from this one, and waits for all of them. Twin of
/// torch.multiprocessing.spawn. Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
/// (127.0.0.1) and a free MASTER_PORT in their environment, so that init_process_group() works, and
/// OMP_NUM_THREADS to a rank's share of the cores, unless it is set. A rank ends when `fn` returns,
/// without static destructors. All ranks end when this process ends in any way, and on Ctrl-C.
///
/// On several hosts each calls it, and `fn` names the world:
///
///     init_process_group({.init_method = "tcp://10.0.0.1:29500", .rank = node * nprocs + rank,
///                         .world_size = nodes * nprocs});
///
/// @return the ranks: all have ended, but for those of `join = false`
/// @throws SpawnError for the first rank that failed, after the others have ended.
/// @throws base::UserError when this process has other threads, uses CUDA, or is in a process group
///   already, since a forked copy would hang or fail; base::UnavailableError when the system cannot
///   start another process.
SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                   const SpawnOptions& options = {});

}  // namespace syncbn::dist

#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

/// How spawn() makes a process for a rank.
enum class StartMethod {
  kFork,  ///< a copy of this process, which must have only one thread and not use CUDA
  kExec,  ///< this program, started again (see SpawnFunction)
};

struct SpawnOptions {
  /// Grace period between SIGTERM and SIGKILL to the other ranks after the first failure.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Wait for the ranks. False: return at once, and wait in SpawnContext::join().
  bool join = true;
  /// Allow more than 32 ranks per usable CPU, which may stall the machine.
  bool oversubscribe = false;
  /// kExec needs a SpawnFunction's name in place of a function.
  StartMethod start_method = StartMethod::kFork;
};

/// Registers a function under a name. spawn() with StartMethod::kExec starts this program again
/// with the same arguments, and run_spawned_rank() in its main() then runs the function, so the
/// calling process may have threads and CUDA contexts. The function reads what it needs from the
/// command line, the environment and files: ranks share no memory with that process, and inherit
/// only stdin, stdout and stderr.
///
///     const dist::SpawnFunction train("train", [](int rank) { ... });  // outside all functions
///
///     int main(int argc, char** argv) {
///       dist::run_spawned_rank();
///       ...
///       dist::spawn("train", dist::device_count(), {.start_method = dist::StartMethod::kExec});
///     }
///
/// A SpawnFunction in a static library registers nothing unless the linker pulls in its object file
/// (CMake: $<LINK_LIBRARY:WHOLE_ARCHIVE,...>).
class SpawnFunction {
 public:
  /// @param name unique in the program
  SpawnFunction(const std::string& name, std::function<void(int rank)> fn);
};

/// In a rank that spawn() started with StartMethod::kExec: runs the rank's function and ends the
/// process. Returns at once in any other process. main() calls it before it starts threads or
/// touches a GPU; it may read the command line first.
void run_spawned_rank();

/// The number of GPUs that a CUDA program sees: from CUDA_VISIBLE_DEVICES, else the driver's list
/// in /proc, else NVML. Loads and initialises no CUDA, so spawn() can fork afterwards. Unlike
/// torch.cuda.device_count(), it does not check that the entries of CUDA_VISIBLE_DEVICES name GPUs.
int device_count();

/// The first failure of a spawned rank, with the message of its exception or its exit status.
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

  /// Waits until all ranks have ended, or for `timeout`. If a rank fails, join() ends the others.
  /// @param timeout 0: do not wait
  /// @return whether all have ended
  /// @throws SpawnError for the first rank that failed, once the others have ended; base::UserError
  ///   for a negative timeout
  bool join(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  /// Process ids, by rank. The system may have reused the id of a rank that has ended.
  std::vector<int> pids() const;

 private:
  friend SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                            const SpawnOptions& options);
  friend SpawnContext spawn(const std::string& function, int nprocs, const SpawnOptions& options);
  template <class StartRank>
  static SpawnContext start(int nprocs, const SpawnOptions& options, const StartRank& start_rank);
  struct State;
  explicit SpawnContext(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

/// Runs `fn(rank)` in `nprocs` processes forked from this one, and waits for all of them. Twin of
/// torch.multiprocessing.spawn. Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
/// (127.0.0.1) and a free MASTER_PORT in their environment, so that init_process_group() works, and
/// OMP_NUM_THREADS to a rank's share of the cores, unless it is set. A rank ends when `fn` returns,
/// without static destructors. All ranks end when the thread that called spawn() ends, when this
/// process ends in any way, and on Ctrl-C.
///
/// On several hosts, call it on each host, and let `fn` give the rank in the world:
///
///     init_process_group({.init_method = "tcp://10.0.0.1:29500", .rank = node * nprocs + rank,
///                         .world_size = nodes * nprocs});
///
/// @return the context; unless `join` is false, all ranks have ended
/// @throws SpawnError for the first rank that failed, after the others have ended.
/// @throws base::UserError when this process has other threads, uses CUDA, or is in a process group
///   already, because a forked copy would hang or fail, and for StartMethod::kExec;
///   base::UnavailableError when the system cannot start another process.
SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                   const SpawnOptions& options = {});

/// Runs the SpawnFunction of this name, with either start method. With StartMethod::kExec the
/// process may have threads, use CUDA and be in a process group; OMP_NUM_THREADS and the other
/// variables are set before the program starts.
/// @throws base::UserError also when no function, or more than one, has the name, or main() has not
///   called run_spawned_rank().
SpawnContext spawn(const std::string& function, int nprocs, const SpawnOptions& options = {});

}  // namespace syncbn::dist

#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/processes.h"

namespace syncbn::launch {

/// One process to start, and the descriptors it gets. They stay the caller's.
struct WorkerSpec {
  std::string file;
  std::vector<std::string> argv;
  std::vector<std::string> env;
  int stdin_fd = -1;  ///< -1: /dev/null
  int stdout_fd = -1;
  int stderr_fd = -1;
  int agent_fd = -1;                         ///< keeps its number
  std::vector<unsigned long> cpu_mask = {};  ///< see cpu_mask(); empty: the launcher's
};

/// Which processes are left below the keeper. A helper is a process that a worker started; a
/// daemon is one that has left the keeper's session.
enum class Left : int32_t { kWorkers, kHelpers, kDaemons, kNothing };

/// What became of a worker; `worker` is its index in the list of specs.
struct KeeperEvent {
  enum class Kind : int32_t {
    kStarted,     ///< it has been forked as `pid`
    kForkFailed,  ///< it could not be forked: `value` is errno; no further event
    kNotStarted,  ///< the signal to end arrived before its turn; no further event
    kBindFailed,  ///< its sched_setaffinity failed: `value` is errno; kExited follows
    kExecFailed,  ///< its execve failed: `value` is errno; kExited follows
    kExited,      ///< it has ended: `value` is its wait status
    kLeft,        ///< all workers have ended: `value` is a Left
  };
  Kind kind{};
  int32_t worker = 0;
  pid_t pid = 0;
  int32_t value = 0;
};

/// The process between launcher and workers that makes sure that nothing outlives a run.
///
/// It is the workers' parent, in a session of its own (so the terminal's signals and the
/// launcher's kill -9 do not reach it), and a subreaper. A socket joins it to the launcher: events
/// come one way, signals to pass on the other, and its end means that the launcher is gone. Then,
/// as after finish(), it kills every descendant until none is left. It looks at the socket before
/// each fork, and starts no more workers after a signal that ends them. Should the keeper itself be
/// killed, the workers die of PR_SET_PDEATHSIG, their orphans come to the launcher, and gone()
/// tells it to kill those. One keeper serves one generation of workers.
class Keeper {
 public:
  /// Forks the keeper, which starts the workers. `when_orphaned` runs in the keeper after it has
  /// cleaned up after a dead launcher.
  /// @param grace time that the processes have to end by themselves when the launcher is gone.
  Keeper(const std::vector<WorkerSpec>& workers, const std::function<void()>& when_orphaned,
         std::chrono::milliseconds grace = {});
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  pid_t pid() const { return pid_; }

  /// Readable when there are events, or when the keeper has ended.
  int fd() const { return socket_.get(); }
  std::optional<KeeperEvent> next_event();

  /// The keeper has ended: after finish() with all descendants dead, otherwise by accident.
  bool gone() const { return gone_; }

  /// Sends a signal to the process group of each worker that runs; when all have ended, to the
  /// helpers. A signal that ends workers also keeps the others from being started; each of these is
  /// reported as kNotStarted.
  void signal_workers(int signal);

  /// Has the keeper kill all that is left, and waits for its end as long as that.
  void finish(std::chrono::seconds patience, Daemons daemons = Daemons::kKill);

 private:
  base::UniqueFd socket_;
  pid_t pid_ = -1;
  bool gone_ = false;
};

}  // namespace syncbn::launch

#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/processes.h"

namespace syncbn::launch {

/// One process to start. The descriptors remain the caller's.
struct WorkerSpec {
  std::string file;
  std::vector<std::string> argv;
  std::vector<std::string> env;
  int stdin_fd = -1;  ///< -1: /dev/null
  int stdout_fd = -1;
  int stderr_fd = -1;
  std::vector<int> inherited = {};           ///< have the same numbers in the process
  std::vector<unsigned long> cpu_mask = {};  ///< of cpu_mask(); empty: the launcher's own
};

/// Which processes are left below the keeper. A helper is a process that a worker started; a
/// daemon is one that has left the keeper's session.
enum class Left : int32_t { kWorkers, kHelpers, kDaemons, kNothing };

/// A report of the keeper; `worker` is an index in the list of specs.
struct KeeperEvent {
  enum class Kind : int32_t {
    kStarted,     ///< it has been forked as `pid`
    kForkFailed,  ///< it could not be forked: `value` is errno; no further event
    kNotStarted,  ///< the signal to end arrived before its turn; no further event
    kBindFailed,  ///< its sched_setaffinity failed: `value` is errno; kExited follows
    kExecFailed,  ///< its execve failed: `value` is errno; kExited follows
    kExited,      ///< it has ended: `value` is its wait status
    kLeft,        ///< all workers have ended: `value` is a Left
    kKeeper,      ///< the first event: the keeper runs as `pid`
  };
  Kind kind{};
  int32_t worker = 0;
  pid_t pid = 0;
  int32_t value = 0;
};

/// A process between launcher and workers that makes sure that nothing outlives a run.
///
/// It is the workers' parent and a subreaper, in a session of its own, so that the terminal's
/// signals do not reach it. A socket connects it to the launcher: the keeper sends events, the
/// launcher sends signals to pass on. If the socket closes, the launcher is gone; then, as after
/// finish(), the keeper kills all its descendants. It looks at the socket before each fork, and
/// starts no more workers after a signal that ends them. If the keeper itself is killed, the
/// workers die of PR_SET_PDEATHSIG, and gone() tells the launcher. A keeper serves one attempt.
///
/// A sentinel stands between launcher and keeper: a subreaper that only waits for the keeper's end.
/// If the keeper was killed, perhaps together with the launcher, the orphans of its workers become
/// the sentinel's children, and it kills them.
class Keeper {
 public:
  /// Forks the keeper, which starts the workers, and waits until it runs.
  /// @param when_orphaned runs in the keeper after it has killed the workers of a dead launcher.
  /// @param grace time for the workers to end by themselves when the launcher is gone.
  Keeper(const std::vector<WorkerSpec>& workers, const std::function<void()>& when_orphaned,
         std::chrono::milliseconds grace = {});
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  pid_t pid() const { return pid_; }

  /// Readable when there are events, or when the keeper has ended.
  int fd() const { return socket_.get(); }
  std::optional<KeeperEvent> next_event();

  /// The keeper has ended. After finish() all descendants are dead; before, it was killed.
  bool gone() const { return gone_; }

  /// After the keeper was killed: waits until the sentinel has killed the processes below it, then
  /// kills all descendants of this process. Each of the two takes up to `patience`.
  void clean_up_after_loss(std::chrono::seconds patience);

  /// Reaps the ended children of this process that the keeper does not know. The first process of
  /// a container adopts every orphan, such as those of `docker exec`.
  void reap_orphans() const;

  /// Sends a signal to the process group of each running worker, or to the helpers if no worker
  /// runs. After a signal that ends workers no more are started; these are reported as kNotStarted.
  void signal_workers(int signal);

  /// Tells the keeper to kill all remaining processes, and waits up to `patience` for its end, or
  /// the sentinel's if the keeper is killed meanwhile. What hangs in the kernel outlives this
  /// object.
  void finish(std::chrono::seconds patience, Daemons daemons = Daemons::kKill);

 private:
  /// After the keeper's end: waits until the sentinel has no children, or the deadline passes; then
  /// ends it. Returns whether it had none.
  bool end_sentinel(Clock::time_point deadline) const;

  base::UniqueFd socket_;
  pid_t sentinel_ = -1;
  pid_t pid_ = -1;
  bool gone_ = false;
};

}  // namespace syncbn::launch

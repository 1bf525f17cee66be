#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace syncbn::launch {

/// Descendants that have left this process's session, by setsid or daemon().
enum class Daemons { kKill, kSpare };

/// Sends SIGKILL to the children of this process, to those they leave behind, and so on, and waits
/// until there is none, or none but the daemons to spare. This process must be a subreaper: then
/// nothing escapes by a fork, setsid or daemon().
void kill_all_descendants(Daemons daemons = Daemons::kKill);

/// The children of a process.
std::vector<pid_t> children_of(pid_t parent);

/// The children of a process that run in its session.
std::vector<pid_t> helpers_of(pid_t parent);

/// Sends a signal to the helpers of this process and to their descendants in its session.
void signal_helpers(int signal);

/// "sleep (pid 12), python3 (pid 13) and 2 more".
std::string describe_helpers(pid_t parent);

/// Becomes the process that orphaned descendants are given to.
void become_subreaper();

/// Locks this process's memory except large mappings, as far as `ulimit -l` allows, so that it can
/// act when the machine has none left. A child by fork() does not inherit the lock.
void lock_memory();

/// Has the kernel's out-of-memory killer prefer this process to the launcher and the keeper.
void raise_oom_score();

/// Raises the limit of open files to what this process may have (`ulimit -Hn`): each worker takes a
/// few.
void raise_descriptor_limit();
/// Back to the limit before, for what is executed next. Safe between fork and exec.
void restore_descriptor_limit();

/// The exit code that stands for a wait status: the code itself, or 128 + signal.
int exit_code_of(int wait_status);

/// "exit code 3" or "killed by signal 11 (SIGSEGV, Segmentation fault)".
std::string describe_status(int wait_status);

}  // namespace syncbn::launch

#pragma once

#include <string>

namespace syncbn::launch {

/// Sends SIGKILL to the children of this process, to those they leave behind, and so on, and waits
/// until there is none. This process must be a subreaper: then nothing escapes by a fork, setsid
/// or daemon().
void kill_all_descendants();

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

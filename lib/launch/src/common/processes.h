#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"

namespace syncbn::launch {

/// What to do with descendants that left this process's session by setsid or daemon().
enum class Daemons { kKill, kSpare };

/// Calls `holds` until it returns true or the deadline passes, at intervals of up to 5 ms, and
/// returns its last result.
bool wait_until(Clock::time_point deadline, const std::function<bool()>& holds);

/// waitpid(), which returns 0 if the process (-1: every child) has not ended by the deadline: a
/// process may hang in the kernel, where not even SIGKILL ends it.
pid_t wait_for_child(pid_t pid, Clock::time_point deadline, int* wait_status = nullptr);

/// Kills all descendants of this process with SIGKILL and waits until they have ended, or the
/// deadline passes; spares daemons if told to. This process must be a subreaper, so that orphans
/// become its children.
void kill_all_descendants(Daemons daemons = Daemons::kKill,
                          Clock::time_point deadline = Clock::time_point::max());

std::vector<pid_t> children_of(pid_t parent);

/// The children of a process that run in its session.
std::vector<pid_t> helpers_of(pid_t parent);

/// Sends a signal to the helpers of this process and to their descendants in its session.
void signal_helpers(int signal);

/// The paths in a folder, as far as it can be read.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The first line of a file; "" if it cannot be read.
std::string first_line(const std::filesystem::path& path);

/// What follows `name` at the beginning of a line of a file; "" if there is none.
std::string value_in(const std::filesystem::path& path, const std::string& name);

/// The state letter of a process or thread by its folder in /proc; '?' if it is not known.
char state_in(const std::filesystem::path& process);

/// "sleep (pid 12), python3 (pid 13), and 2 more".
std::string describe_helpers(pid_t parent);

/// Replaces the name and the command line that ps and `pkill -f` see of this process, so that a
/// pattern which matches the launcher does not match the forked processes that clean up after it.
/// @param name at most 15 bytes
void rename_process(std::string_view name);

/// Makes this process the new parent of its orphaned descendants.
void become_subreaper();

/// Locks the pages of the current mappings that this process uses, now or later, as far as
/// `ulimit -l` allows, so that it keeps working when the machine is out of memory. A child by
/// fork() does not inherit the lock.
void lock_memory();

/// An oom_score_adj above this process's own: the kernel's out-of-memory killer first chooses a
/// process that has it.
std::string raised_oom_score();

/// Sets this process's score. Without iostreams, which would touch 34 pages in each forked worker.
void set_oom_score(const std::string& score);

/// Raises the limit of open files to the hard limit (`ulimit -Hn`): each worker needs a few.
void raise_descriptor_limit();
/// Undoes raise_descriptor_limit(), for a program to execute. Safe between fork and exec.
void restore_descriptor_limit();

/// The exit code in a wait status, or 128 + signal.
int exit_code_of(int wait_status);

/// False for a worker that would fail the same way again, or was asked to stop.
bool restart_may_help(int wait_status);

/// How a process ended.
struct ExitStatus {
  std::optional<int> wait_status;  ///< empty: it could not be started
  bool out_of_memory = false;      ///< probably killed by the kernel for lack of memory

  /// "exit code 3", "killed by signal 11 (SIGSEGV, Segmentation fault)" or "cannot be started".
  std::string in_words() const;
};

}  // namespace syncbn::launch

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// What a worker does, as far as its launcher and /proc know. Launchers send it to each other.
struct WorkerState {
  int rank = 0;
  std::string host = {};
  pid_t pid = 0;
  char process = '?';  ///< as in ps: R, S, D, T (stopped), Z; '?': it has ended
  pid_t tracer = 0;    ///< the debugger that is attached; 0: none
  std::string place =
      {};                ///< the system call in which its main thread is, as a number; or "running"
  bool reports = false;  ///< it has sent records over the agent channel
  uint64_t steps = 0;    ///< since the start of the run
  uint64_t reported_ns = 0;  ///< when it told of these steps, on its host's CLOCK_MONOTONIC
  uint64_t collective = 0;   ///< the number of the one in which it waits for others; 0: none
  std::string doing = {};    ///< in its own words, such as "evaluation"
  double idle_seconds = 0;   ///< since its last progress

  nlohmann::json json() const;
  /// @throws nlohmann's exceptions if `json` has a different form.
  static WorkerState of(const nlohmann::json& json);
};

/// Fills `process`, `tracer` and `place` from /proc.
void look_at_process(WorkerState& worker);

/// The rank for which the others wait.
struct Culprit {
  int rank = 0;
  std::string host = {};
  std::string why;       ///< follows "rank 3 (host a) "
  bool is_sure = false;  ///< by its own records or its process's state, not by a difference alone
};

/// Which of the workers of all nodes holds up the others; empty if nothing distinguishes them, or
/// if a debugger is attached to one. A stopped process comes first; then, by their records, one
/// that does not wait in a collective, waits in an earlier one or has made fewer steps than others
/// at the same time; then one whose main thread is elsewhere than those of all others.
std::optional<Culprit> find_culprit(const std::vector<WorkerState>& workers);

/// What to say and do about workers that make no progress.
struct Hang {
  int rank = -1;            ///< the worker to end; -1: none
  std::string text;         ///< one line
  bool stops_time = false;  ///< --hang_timeout begins anew, because of a debugger

  nlohmann::json json() const;
  /// @throws nlohmann's exceptions if `json` has a different form.
  static Hang of(const nlohmann::json& json);
};

/// @param workers of all nodes, of which some have made no progress for `seconds`.
/// @param ends whether the culprit is to be ended. Otherwise it is only named, if it is sure.
std::optional<Hang> judge_hang(const std::vector<WorkerState>& workers, double seconds, bool ends);

/// A table with a line for each worker, for `syncbn-launch status`.
std::string table_of(const std::vector<WorkerState>& workers);

/// The threads of a process with their states, for a report about a worker that hangs: the stacks
/// that py-spy, eu-stack or gdb print within `seconds`, or else the kernel's view of each thread.
std::string describe_threads(pid_t pid, double seconds);

}  // namespace syncbn::launch

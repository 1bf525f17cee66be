#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "job/rank_record.h"

namespace syncbn::launch {

/// What a worker does, as far as its launcher and /proc know. Launchers send it to each other.
struct WorkerState {
  int rank = 0;
  ShownText host = {};
  pid_t pid = 0;
  ShownText process = "?";  ///< as in ps: R, S, D, T (stopped), Z; "?": it has ended
  pid_t tracer = 0;         ///< the debugger that is attached; 0: none
  /// The system call in which its main thread is, as a number; or "running".
  ShownText place = {};
  bool reports = false;        ///< it has sent records over the agent channel
  uint64_t steps = 0;          ///< since the start of the run
  uint64_t reported_ns = 0;    ///< time of that report, on its host's CLOCK_MONOTONIC
  uint64_t collective = 0;     ///< number of the one in which it waits for others; 0: none
  ShownText doing = {};        ///< in its own words, such as "evaluation"
  double idle_seconds = 0;     ///< since its last progress
  double allowed_seconds = 0;  ///< additional time that it has asked for

  uint64_t calls = 0;      ///< of lib/dist, since its start
  double own_seconds = 0;  ///< time in which neither a thread nor the GPU waited for a call
  ShownText gpu = {};      ///< the GPU that it computes on; "": none

  /// A call of lib/dist in which it has waited for a second.
  struct Wait {
    std::string group;
    uint64_t sequence = 0;  ///< of a collective, in its group
    int peer = -1;          ///< of a send or recv; -1: a collective
    ShownText call;         ///< "all_reduce #41 of group 'default_pg'"
    double seconds = 0;
    RankRuns ranks;  ///< the group's
  };
  std::vector<Wait> waits = {};  ///< the first few
  /// By group, the number of the last collective that it has called. Empty for programs without
  /// lib/dist.
  std::map<std::string, uint64_t> called = {};

  /// "rank 3 (host, GPU 0000:dc:00.0, pid 7)".
  std::string name() const;
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerState::Wait, group, sequence, peer, call, seconds, ranks)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerState, rank, host, pid, process, tracer, place, reports,
                                   steps, reported_ns, collective, doing, idle_seconds,
                                   allowed_seconds, calls, own_seconds, gpu, waits, called)

/// If their JSON would exceed `max_bytes`, leaves out all calls, then the last workers.
std::vector<WorkerState> shortened(std::vector<WorkerState> workers, size_t max_bytes);

/// Fills `waits` and `called`.
void describe_calls(const RankRecord& record, WorkerState& worker);

/// The words for WorkerState::process.
std::string state_name(const std::string& state);

/// The state letter in /proc, such as 'T' of a stopped process; '?' if it is not known.
char state_of_process(pid_t pid);

/// Fills `process`, `tracer` and `place` from /proc.
void look_at_process(WorkerState& worker);

/// A table with a line for each worker, for `syncbn-launch status`.
std::string table_of(const std::vector<WorkerState>& workers);

/// The threads of a process with their states, for a report about a worker that hangs: the stacks
/// that py-spy, eu-stack or gdb print by the deadline, or else the kernel's view of each thread.
std::string describe_threads(pid_t pid, Clock::time_point deadline);

/// Sends SIGABRT to a process that catches it, as Python's faulthandler does to print the lines of
/// all threads, and waits for its end until the deadline.
void abort_if_caught(pid_t pid, Clock::time_point deadline);

}  // namespace syncbn::launch

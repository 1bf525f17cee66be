#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "job/record_message.h"
#include "job/restart_policy.h"
#include "job/stragglers.h"
#include "job/torchrun_protocol.h"
#include "job/worker_state.h"
#include "nodes/master_port.h"
#include "nodes/peers.h"
#include "nodes/torchrun.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// Leads the launchers of a job, inside the launcher of node 0: waits for all of them, assigns
/// ranks, starts each attempt, stops it on all nodes when a worker fails on any, and determines the
/// job's exit code. It also serves the workers' store, which it empties between attempts. The
/// folder's README lists the messages.
///
/// If nodes may change, the first attempt starts when the maximum of --nnodes has joined, or
/// last_call_timeout after the minimum has. A node that joins later, leaves or is lost causes a new
/// attempt, which does not count as a restart; nodes beyond the maximum stand by.
///
/// Never waits. Not thread-safe.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  /// Time between two notices about the nodes that are missing.
  static constexpr std::chrono::seconds kNoticePeriod{10};

  /// @param job_id unique to this run; workers find it as SYNCBN_JOB_ID.
  /// @param listener listens on `master_port`.
  Coordinator(const LaunchOptions& options, std::string job_id, int master_port,
              base::UniqueFd listener);
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Call handle() when fd() is readable, and at due().
  int fd() const { return peers_.fd(); }
  Clock::time_point due() const { return due_; }
  void handle();

  /// Ends the job on all nodes, for a reason other than a failed worker.
  void end_job(int exit_code, const std::string& text);
  /// When all nodes of the first attempt had joined, once.
  std::optional<Clock::time_point> take_joined() { return std::exchange(joined_, std::nullopt); }
  /// Lines for the user at this launcher.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// The flight records of all ranks after an attempt that failed, once, before its consequence is
  /// known.
  std::optional<JobRecords> take_records() { return std::exchange(records_, std::nullopt); }
  /// Tells the nodes that this process is about to be stopped, so that they do not take it for
  /// lost.
  void pause();

 private:
  struct Failure {
    int exit_code = 0;
    std::string text = {};
    bool may_restart = false;
    int node = -1;  ///< that of the failed worker; -1: another reason
    FailureCause cause = {};
  };

  void handle_message(PeerLauncher& node, const nlohmann::json& message);
  void hello(PeerLauncher& node, const Hello& hello);
  /// Why the launcher cannot join this job, or "".
  std::string mismatch(const PeerLauncher& node, const Hello& hello) const;
  void welcome(PeerLauncher& node);
  void lost(PeerLauncher& node);
  /// @param wanted -1: any.
  int rank_for(int wanted, bool leads) const;

  bool is_here(int node) const;
  /// Whether a client of the store may come from there: with a token, only from the hosts of
  /// launchers that know it.
  bool admits(int client) const;
  /// Adds a line about a stranger, unless there have been many.
  void note_stranger(const std::string& text);
  void leave_torchruns_barrier();

  /// Asks all nodes what their workers do.
  void inquire();
  void conclude_inquiry();
  struct Inquiry;
  void send_status(PeerLauncher& node, const Inquiry& inquiry);

  /// @param why the file of the records is written.
  void ask_for_records(const std::string& why, bool ends_attempt);
  /// Whether the rank is one of the node's in this attempt.
  bool is_of(const PeerLauncher& node, int rank) const;
  void keep_record(const PeerLauncher& node, const nlohmann::json& message);
  void conclude_collection();
  void send_records(PeerLauncher& node, const JobRecords& records);

  void handle_times();
  std::string missing() const;
  int present() const;
  int taking_part() const;
  void start_when_complete();
  void start_attempt();
  void start_node(int rank, int index, const AssignedRanks& ranks);
  void end_attempt();
  void start_again(const std::string& reason);
  /// Ends this attempt because a node has joined or left.
  void change_nodes(const std::string& text);
  void fail(const Failure& failure);
  /// Whether launchers on that host cannot join, because it has failed too often.
  bool excludes(const std::string& host) const;
  std::string exclusion(const std::string& host) const;
  bool leaves_out(int rank, const std::string& text);
  void stop_attempt(const std::string& text);
  void finish(const Failure& result);
  void send_finish(PeerLauncher& node);

  const LaunchOptions& options_;
  const std::string job_id_;
  const int master_port_;
  StoreServer store_;
  TorchrunNodes torchrun_nodes_;
  Peers peers_;
  Clock::time_point due_;
  Clock::time_point join_deadline_;
  std::optional<Clock::time_point> last_call_;  ///< its end, once the minimum has joined
  Clock::time_point next_notice_;
  Clock::time_point next_alive_;

  enum class State { kJoining, kRunning, kLeaving, kFinished };
  State state_ = State::kJoining;
  std::optional<Clock::time_point> joined_;
  int attempt_ = 0;
  int restarts_ = 0;  ///< because of failures
  RestartPolicy policy_;
  std::optional<Clock::time_point> restart_at_;  ///< not earlier, after failures in a row
  std::string reason_;                           ///< why this attempt follows another
  bool over_ = false;                            ///< a signal ends the job with this attempt
  std::string node_change_;                      ///< why nodes change after this attempt, or ""
  /// Of rank 0's store in this attempt, if workers do not share the launchers' store.
  std::optional<base::HeldPort> workers_port_;
  std::optional<Clock::time_point> end_by_;  ///< nodes that have been stopped
  bool failed_ = false;                      ///< this attempt
  Failure failure_;  ///< the first of this attempt; in the end, the result of the job
  /// A question to all nodes what their workers do, and who wants to know.
  struct Inquiry {
    Clock::time_point deadline;
    std::set<int> open = {};  ///< nodes that have not answered
    std::vector<WorkerState> workers = {};
    std::set<int> asking = {};               ///< nodes that want the answer, for `status`
    std::optional<double> no_progress = {};  ///< seconds that a worker has made none
    bool ends_culprit = false;
    bool compares_speed = false;
  };
  std::optional<Inquiry> inquiry_;
  /// The ranks of a node in this attempt.
  struct Part {
    std::string node;
    int first = 0;
    int count = 0;
  };
  std::map<int, Part> parts_;  ///< by node rank
  int world_size_ = 1;         ///< of this attempt
  /// The question to all nodes for their ranks' flight records.
  struct Collection {
    int number;  ///< tells its answers from those to an earlier question
    Clock::time_point deadline;
    bool ends_attempt;          ///< the attempt has failed; else only `asking` wait
    std::set<int> open = {};    ///< nodes that have not sent all
    std::set<int> sent = {};    ///< nodes that have
    std::set<int> asking = {};  ///< nodes that want the answer, for `explain`
    JobRecords records = {};
  };
  bool is_ending_attempt() const { return collection_ && collection_->ends_attempt; }
  int collections_ = 0;
  bool wants_records_ = false;  ///< of this attempt
  std::optional<Collection> collection_;
  std::optional<JobRecords> records_;
  std::map<std::string, int> failures_;  ///< by host: of its workers, and losses of its launcher
  StragglerWatch stragglers_;            ///< of this attempt
  Clock::time_point next_comparison_;    ///< of the ranks' speed
  std::vector<std::string> notices_;
  int strangers_noted_ = 0;
};

}  // namespace syncbn::launch

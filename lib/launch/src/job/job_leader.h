#pragma once

#include <syncbn/launch/options.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "job/job_messages.h"
#include "job/restart_policy.h"
#include "job/stragglers.h"
#include "job/torchrun_protocol.h"

namespace syncbn::launch {

/// What the leader tells its host to do: to send a message to a node, or to all. To kHere, a
/// Waiting is a line for the user of this launcher.
struct LeaderCommand {
  static constexpr int kAll = -1;
  static constexpr int kHere = -2;
  int node = kAll;
  ToNode message;
};

/// Leads the nodes of a job, of which there may be one: waits for all of them, assigns ranks,
/// starts each attempt, stops it on all nodes when a worker fails on any, and determines the job's
/// exit code. A state machine: it has no clock and no connections. Each event takes the current
/// time and adds commands, which the host carries out in their order. A node that gets a
/// Refuse is gone. docs/architecture.md draws the states.
///
/// If nodes may change, the first attempt starts when the maximum of --nnodes has joined, or
/// last_call after the minimum has. A node that joins later, leaves or is lost causes a new
/// attempt, which does not count as a restart; nodes beyond the maximum stand by. Not thread-safe.
class JobLeader {
 public:
  using Time = Clock::time_point;

  /// kLeaving: all workers have succeeded, and torchrun's agents are in the barrier.
  enum class State { kJoining, kRunning, kLeaving, kFinished };

  /// Interval between two notices about the nodes that are missing.
  static constexpr std::chrono::seconds kNoticePeriod{10};

  /// @param options must outlive this object.
  JobLeader(const LaunchOptions& options, std::string job_id, Time now);

  /// Why a node cannot join now, or "".
  std::string refusal(const Hello& hello) const;
  /// The rank for a node that may join. @param wanted -1: any.
  int rank_for(int wanted, bool leads) const;
  /// @param rank from rank_for().
  void join(int rank, const Hello& hello, Time now);
  void join_torchrun(int rank, const TorchrunRole& role, Time now);
  void receive(int node, const FromNode& message, Time now);
  /// The connection to a node has ended, or it has been silent for too long.
  void lose(int node, Time now);
  /// Ends the job, for a reason other than a failed worker.
  void end(int exit_code, const std::string& what, Time now);
  /// torchrun's agents have left the barrier. @param complete all of them had entered it.
  void leave_barrier(bool complete, Time now);
  /// Call it at due().
  void tick(Time now);
  Time due() const;

  std::vector<LeaderCommand> take_commands() { return std::exchange(commands_, {}); }
  /// The flight records of all ranks after an attempt that failed, before its consequence is known.
  std::optional<FlightFile> take_records() { return std::exchange(records_, std::nullopt); }
  State state() const { return state_; }
  bool has(int node) const { return nodes_.contains(node) || torchruns_.contains(node); }
  /// Whether a node may be silent, as it has announced a pause, which must delay neither the end of
  /// an attempt that failed nor that of the job.
  bool excuses(int node) const {
    return (!failed_ || state_ == State::kJoining) && nodes_.contains(node) &&
           nodes_.at(node).paused;
  }

 private:
  struct Node {
    std::string host;
    std::string name;  ///< "node 1 (host)"; "": the only node
    TorchrunRole role;
    bool takes_part = false;  ///< in this attempt
    bool ended = false;       ///< its workers have ended in this attempt
    bool leaving = false;     ///< it leaves the job; the others go on
    bool excluded = false;    ///< it has to leave (--exclude_failing)
    bool paused = false;

    std::string says(const std::string& what) const {
      return name.empty() ? what : name + ": " + what;
    }
  };
  /// A question to all nodes what their workers do, and who wants to know.
  struct Inquiry {
    Time deadline;
    std::set<int> open = {};  ///< nodes that have not answered
    std::vector<WorkerState> workers = {};
    std::set<int> asking = {};               ///< nodes that want the answer, for `status`
    std::optional<double> no_progress = {};  ///< seconds that a worker has made none
    bool ends_culprit = false;
    bool compares_speed = false;
  };
  /// The question to all nodes for their ranks' flight records.
  struct Collection {
    int number;  ///< tells its answers from those to an earlier question
    Time deadline;
    bool ends_attempt;          ///< the attempt has failed; else only `asking` wait
    std::set<int> open = {};    ///< nodes that have not sent all
    std::set<int> sent = {};    ///< nodes that have
    std::set<int> asking = {};  ///< nodes that want the answer, for `explain`
    FlightFile file = {};
  };
  /// The ranks of a node in this attempt.
  struct Part {
    std::string node;
    int first = 0;
    int count = 0;
  };

  template <class Message>
  void on(int /*node*/, const Message& /*of the connection*/) {}
  void on(int node, const Failed& message);
  void on(int node, const Ended& message);
  void on(int node, const EndJob& message);
  void on(int node, const Leave& message);
  void on(int node, const Stalled& message);
  void on(int node, const Workers& message);
  void on(int node, const Record& message);
  void on(int node, const Records& message);
  void on(int node, const AskStatus& /*message*/) { inquire().asking.insert(node); }
  void on(int node, const AskAllRecords& message);

  void send(int node, ToNode message) { commands_.push_back({node, std::move(message)}); }
  void send_all(ToNode message) { send(LeaderCommand::kAll, std::move(message)); }
  void notice(std::string line) { send(LeaderCommand::kHere, Waiting{std::move(line)}); }
  void refuse(int node, int exit_code, const std::string& why);
  /// Goes on without a node, which no longer counts.
  void remove(int node);
  /// Whether a failure may have this exit code: only the leader concludes success.
  bool accepts(int node, int exit_code);

  Inquiry& inquire();
  void conclude_inquiry();
  void ask_for_records(const std::string& why, bool ends_attempt);
  /// Whether the rank is one of the node's in this attempt.
  bool is_of(int node, int rank) const;
  bool is_answer(int node, int question) const;
  void check_collection();
  void conclude_collection();
  void send_records(int node, const FlightFile& file);

  std::string missing() const;
  int present() const;
  int taking_part() const;
  bool all_ended() const;
  void start_if_enough_nodes();
  void start_attempt();
  void end_attempt();
  void start_again(const std::string& reason);
  /// Ends this attempt because a node has joined or left.
  void change_nodes(const std::string& what);
  /// @param node that of the failed worker; -1: another reason.
  void fail(const JobFailure& failure, int node = -1);
  bool is_excluded(const std::string& host) const;
  std::string exclusion(const std::string& host) const;
  bool goes_on_without(int rank, const std::string& what);
  void stop_attempt(const JobFailure& why);
  void finish(const JobFailure& result);
  void drop_late_nodes();
  bool compares_speed() const;

  const LaunchOptions& options_;
  const std::string job_id_;
  Time now_;  ///< of this event
  std::vector<LeaderCommand> commands_;
  State state_ = State::kJoining;
  std::map<int, Node> nodes_;              ///< by node rank
  std::map<int, TorchrunRole> torchruns_;  ///< nodes that torchrun runs

  Time join_deadline_;
  std::optional<Time> last_call_;  ///< its end, once the minimum has joined
  Time next_notice_;

  int attempt_ = 0;
  int restarts_ = 0;  ///< because of failures
  RestartPolicy restart_policy_;
  std::optional<Time> restart_at_;  ///< not earlier, after failures in a row
  std::string reason_;              ///< why this attempt follows another
  std::map<int, Part> parts_;       ///< by node rank
  int world_size_ = 1;

  bool failed_ = false;         ///< this attempt
  JobFailure failure_;          ///< the first of this attempt; in the end, the result of the job
  std::string no_restart_;      ///< why the policy refuses one
  bool over_ = false;           ///< a signal ends the job with this attempt
  std::string node_change_;     ///< why nodes change after this attempt, or ""
  std::optional<Time> end_by_;  ///< nodes that have been stopped
  std::map<std::string, int> failures_;  ///< by host: of its workers, and losses of its launcher

  std::optional<Inquiry> inquiry_;
  int collections_ = 0;
  bool wants_records_ = false;  ///< of this attempt
  std::optional<Collection> collection_;
  std::optional<FlightFile> records_;
  StragglerWatch stragglers_;  ///< of this attempt
  Time next_comparison_;       ///< of the ranks' speed
};

}  // namespace syncbn::launch

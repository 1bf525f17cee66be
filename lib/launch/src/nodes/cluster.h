#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/env.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/descriptors.h"
#include "common/handshake.h"
#include "job/record_message.h"
#include "job/run_context.h"
#include "job/status_socket.h"
#include "job/worker_state.h"
#include "nodes/coordinator.h"
#include "nodes/torchrun.h"

namespace syncbn::launch {

/// A node's link to the coordinator, which on node 0 this object owns; or to torchrun's agent, if
/// torchrun runs node 0. All work is done in handle(), inside the caller's poll loop. Not
/// thread-safe.
class Cluster {
 public:
  using Clock = std::chrono::steady_clock;

  /// The end of the job, the same on all nodes.
  struct Finish {
    int exit_code = 0;
    std::string what;      ///< the first failure; empty: success
    bool is_ours = false;  ///< a worker of this node failed first
  };

  /// @param job_id the coordinator's, on node 0.
  /// @param listener listens on `master_port` on node 0; empty on others.
  Cluster(const LaunchOptions& options, const std::string& job_id, int master_port,
          base::UniqueFd listener);
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  /// Call handle() when fd() is readable, and at due().
  int fd() const { return watched_.fd(); }
  Clock::time_point due() const;
  void handle();

  /// Whether the coordinator runs here: other nodes need this launcher until finish().
  bool leads() const { return coordinator_ != nullptr; }

  /// On node 0: when all nodes of the first attempt had joined, once.
  std::optional<Clock::time_point> take_joined() {
    return leads() ? coordinator_->take_joined() : std::nullopt;
  }
  /// The next attempt, once; nothing until all nodes are ready for it. Without a job_id if torchrun
  /// runs node 0.
  std::optional<Assignment> take_start() { return std::exchange(start_, std::nullopt); }
  bool has_start() const { return start_.has_value(); }
  const std::optional<Finish>& finish() const { return finish_; }
  /// Why this node must stop its workers, or "".
  const std::string& stop_reason() const { return stop_reason_; }
  /// Whether a failure is that reason, and not a signal or a change of the nodes.
  bool stop_is_failure() const { return stop_is_failure_; }
  /// Whether another launcher wants to know what the workers of this node do; once for each
  /// question. Answer by report_workers().
  bool take_inquiry() { return std::exchange(is_asked_, false); }
  void report_workers(const std::vector<WorkerState>& workers);
  /// Asks what the workers of all nodes do. take_status() returns the answer when it is there: an
  /// object with "workers", and "silent", lines about workers that it lacks.
  void ask_status() { send({{"type", "ask_status"}}); }
  std::optional<nlohmann::json> take_status() { return std::exchange(status_, std::nullopt); }
  /// A worker of this node has made no progress for so long. take_hang() returns what all nodes
  /// are to do about it.
  /// @param ends whether the culprit is to be ended.
  void report_stall(double seconds, bool ends);
  std::optional<Hang> take_hang() { return std::exchange(hang_, std::nullopt); }
  /// Whether a node of the job is, or just was, stopped as by Ctrl-Z, which stops the workers'
  /// time.
  bool take_hold() { return std::exchange(holds_, false) || paused_; }

  /// Whether node 0 asks for the flight records of this node's ranks; once for each question.
  /// Answer by report_record() for each of them, then report_records().
  bool take_record_request() { return std::exchange(asks_for_records_, false); }
  void report_record(const RankMemory& rank);
  void report_records();
  /// On node 0: Coordinator::take_records().
  std::optional<JobRecords> take_records() {
    return leads() ? coordinator_->take_records() : std::nullopt;
  }

  /// Lines for the user.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }

  /// The first failure among this node's workers. @param cause without a rank: no worker has
  /// failed.
  void report_failure(int exit_code, bool may_restart, const std::string& what,
                      const FailureCause& cause);
  /// Tells node 0, in place of joining, that this node cannot start its workers, which ends the
  /// job. Returns when node 0 has answered, or after 10 s.
  void report_no_start(int exit_code, const std::string& what);
  /// A signal ends this launcher: the node leaves the job if nodes may change; else the job ends.
  void report_signal(int signal);
  /// All workers of this node have ended.
  void report_end();
  /// Tells the others that this process is about to be stopped, so that they do not take it for
  /// lost.
  void pause();

 private:
  void connect();
  void finish_connecting();
  void send_hello();
  void handle_messages();
  void handle_record_requests();
  void shake_hands();
  void handle_message(const nlohmann::json& message);
  void send(const nlohmann::json& message);
  void watch();
  std::string own_name() const {
    return options_.local_addr.empty() ? base::hostname() : options_.local_addr;
  }
  void lose_coordinator();
  /// Returns whether torchrun runs node 0.
  bool find_torchrun();
  void handle_torchrun();
  void end(int exit_code, const std::string& what, bool is_ours = false);

  const LaunchOptions& options_;
  const std::string host_;  ///< of the coordinator
  const int port_;
  WatchSet watched_{"cannot watch the connection to node 0"};
  std::unique_ptr<Coordinator> coordinator_;  ///< on node 0
  base::UniqueFd connecting_;
  std::optional<base::Channel> link_;
  std::optional<TorchrunLead> torchrun_;
  enum class TorchrunState { kJoining, kRunning, kLeaving };
  TorchrunState torchrun_state_ = TorchrunState::kJoining;
  std::string connect_error_;
  size_t next_address_ = 0;  ///< index of the next address of host_ to try
  bool resolve_error_said_ = false;
  Handshake handshake_;                            ///< of the current connection
  std::unique_ptr<base::MessageSeal> protection_;  ///< once the handshake is done
  bool accepted_ = false;                          ///< the coordinator has answered

  Clock::time_point join_deadline_;
  std::optional<Clock::time_point> next_try_;
  Clock::time_point next_notice_;
  Clock::time_point next_alive_;
  Clock::time_point heard_;
  bool paused_ = false;  ///< the coordinator's process is stopped

  int attempt_ = 0;
  std::chrono::milliseconds alive_period_;
  std::chrono::milliseconds silence_;
  const Clock::time_point reopened_by_;
  int times_dropped_ = 0;  ///< connections that node 0 has closed before it had answered
  bool is_asked_ = false;
  bool asks_for_records_ = false;
  int record_question_ = 0;
  StatusServer record_requests_{StatusServer::kRecords};  ///< of `explain`
  std::map<int, std::string> job_records_;  ///< JobRecords::messages that have come for it
  bool holds_ = false;
  std::optional<Hang> hang_;
  std::optional<nlohmann::json> status_;
  std::optional<int> left_by_signal_;
  std::optional<Finish> no_start_;  ///< why this node cannot start its workers
  std::optional<Assignment> start_;
  std::optional<Finish> finish_;
  std::string stop_reason_;
  bool stop_is_failure_ = false;
  std::vector<std::string> notices_;
};

}  // namespace syncbn::launch

#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "job/torchrun_protocol.h"
#include "nodes/master_port.h"
#include "nodes/peers.h"
#include "nodes/torchrun_nodes.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// Leads the launchers of a job, inside the launcher of node 0: waits for all of them, assigns
/// ranks, starts every attempt, stops it everywhere when a worker fails anywhere, and decides the
/// job's exit code. It also holds the store of the workers, which it empties between attempts. The
/// folder's README lists the messages.
///
/// If nodes may change, the first attempt waits for the maximum of --nnodes, but only for the last
/// call once the minimum has joined. A node that joins later, leaves or is lost begins a new
/// attempt, which does not count as a restart; nodes beyond the maximum stand by.
///
/// Never waits. Not thread-safe.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  /// Between two notices about what the job waits for.
  static constexpr std::chrono::seconds kNoticePeriod{10};

  struct Options {
    std::string run_id;
    std::string job_id;  ///< of this run, which workers find as SYNCBN_JOB_ID
    NodeRange nodes;
    bool nodes_may_change = false;
    bool knows_ranks = true;  ///< every node has --node_rank
    int max_restarts = 0;
    std::string master_addr;
    int master_port = 0;
    /// Whether workers use this store. Otherwise rank 0 holds one, at a free port of node 0.
    bool agent_store = true;
    std::chrono::milliseconds join_timeout{};
    std::chrono::milliseconds last_call{};
    std::chrono::milliseconds alive_period{};
    std::chrono::milliseconds silence{};  ///< after which a node counts as lost
  };

  /// @param listener listens on the port.
  Coordinator(Options options, base::UniqueFd listener);
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Readable when handle() has something to do; besides, it is due at a time.
  int fd() const { return peers_.fd(); }
  Clock::time_point due() const { return due_; }
  void handle();

  /// Ends the job on all nodes for another reason than a worker.
  void end_job(int exit_code, const std::string& text);
  /// Lines for the user at this launcher.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// This process is about to be stopped: the nodes must not take it for lost.
  void pause();

 private:
  void handle_message(PeerLauncher& node, const nlohmann::json& message);
  void hello(PeerLauncher& node, const Hello& hello);
  /// Why the newcomer does not belong to this job; empty: it does.
  std::string mismatch(const PeerLauncher& node, const Hello& hello) const;
  void welcome(PeerLauncher& node);
  void failed(PeerLauncher& node, const nlohmann::json& message);
  void leave(PeerLauncher& node);
  void ended(PeerLauncher& node, const nlohmann::json& message);
  void lost(PeerLauncher& node);
  /// The rank of a node that wants this one, -1: any.
  int rank_for(int wanted, bool leads) const;

  void find_torchrun_nodes();
  bool is_here(int node) const;
  void enter_torchruns_barrier();
  void leave_torchruns_barrier();

  void handle_times();
  std::string missing() const;
  /// Nodes that could take part in an attempt.
  int present() const;
  int taking_part() const;
  void start_when_complete();
  void start_attempt();
  void start_node(int rank, int index, const AssignedRanks& ranks);
  void end_attempt();
  void start_again(const std::string& reason);
  /// A node has joined or left during this attempt.
  void change_nodes(const std::string& text);
  /// @param node whose worker failed, if that is the reason.
  void fail(int exit_code, bool may_restart, const std::string& text, int node = kNoNode);
  void stop_attempt(const std::string& text);
  void finish(int exit_code, const std::string& text);
  void send_finish(PeerLauncher& node);

  static constexpr int kNoNode = -1;

  const Options options_;
  StoreServer store_;
  TorchrunNodes torchrun_nodes_;
  Peers peers_;
  Clock::time_point due_;
  Clock::time_point join_deadline_;
  std::optional<Clock::time_point> last_call_;  ///< when it ends
  Clock::time_point next_notice_;
  Clock::time_point next_alive_;

  enum class State { kJoining, kRunning, kLeaving, kFinished };
  State state_ = State::kJoining;
  int attempt_ = 0;
  int restarts_ = 0;         ///< that --max_restarts counts
  std::string reason_;       ///< why this attempt follows another
  bool over_ = false;        ///< this attempt is the last
  std::string node_change_;  ///< why nodes change after this attempt; empty: they do not
  std::optional<base::HeldPort> workers_port_;  ///< of this attempt, without agent_store
  bool failed_ = false;                         ///< this attempt
  // Of the first failure in this attempt, and at last of the job.
  int exit_code_ = 0;
  bool may_restart_ = false;
  std::string failure_text_;
  int failed_node_ = kNoNode;
  std::vector<std::string> notices_;
};

}  // namespace syncbn::launch

#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "job/assigned_ranks.h"
#include "nodes/hello.h"
#include "nodes/master_port.h"
#include "nodes/peers.h"
#include "nodes/torchrun_nodes.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// Leads the launchers of a job, inside the launcher of node 0: waits for all of them, deals out
/// the ranks, starts every attempt, ends it everywhere when a worker fails anywhere, and says what
/// the job's exit code is. It also holds the store of the workers, which is emptied between
/// attempts.
///
/// Where nodes may change, the first attempt waits for the most of them, but once the fewest are
/// there only for the time of a last call. A node that comes later, leaves, or is lost begins a new
/// attempt of those that are there, which does not count as a restart; one that comes when the most
/// take part stands by.
///
/// Nodes that torchrun runs meet us in the store, by torchrun's keys: they take part in one
/// attempt.
///
/// Messages to it: hello, failed, end, leave, ended, pause, alive. From it: welcome, refuse,
/// waiting, start, stop, finish, pause, alive; docs/architecture.md has their order. Never waits.
/// Not thread-safe.
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
    bool knows_ranks = true;  ///< nodes come with their ranks
    int max_restarts = 0;
    std::string master_addr;
    int master_port = 0;
    /// Whether workers use our store; otherwise their rank 0 gets a free port of node 0 for one.
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

  /// Ends the job, everywhere, for another reason than a worker.
  void end_job(int exit_code, const std::string& text);
  /// Lines for the person who waits here.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// This process is about to be stopped: its silence means nothing.
  void pause();

 private:
  void handle_message(PeerLauncher& node, const nlohmann::json& message);
  void hello(PeerLauncher& node, const Hello& hello);
  /// Why the newcomer does not fit; empty: it does.
  std::string misfit(const PeerLauncher& node, const Hello& hello) const;
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
  /// The nodes are others than those with which this attempt began.
  void change_nodes(const std::string& text);
  /// @param node where a worker is the reason.
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
  int restarts_ = 0;         ///< those that count
  std::string reason_;       ///< why this attempt follows another
  bool over_ = false;        ///< this attempt is the last
  std::string node_change_;  ///< that ends this attempt; empty: none
  std::optional<base::HeldPort>
      workers_port_;     ///< of this attempt, where they have their own store
  bool failed_ = false;  ///< this attempt
  // Of the first failure in this attempt, and in the end of the job.
  int exit_code_ = 0;
  bool may_restart_ = false;
  std::string failure_text_;
  int failed_node_ = kNoNode;
  std::vector<std::string> notices_;
};

}  // namespace syncbn::launch

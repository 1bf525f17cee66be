#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "agent_link.h"
#include "assigned_ranks.h"
#include "master_port.h"
#include "store_server.h"
#include "torchrun_keys.h"

namespace syncbn::launch {

/// Leads the launchers of a job, inside the launcher of node 0: waits for all of them, deals out
/// the ranks, starts every attempt, ends it everywhere when a worker fails anywhere, and says what
/// the job's exit code is. It also holds the store of the workers, which is emptied before each
/// attempt.
///
/// Nodes that torchrun runs meet us in the store, by torchrun's keys: they take part in one
/// attempt.
///
/// Messages to it: hello, failed, ended, alive. From it: refuse, waiting, start, stop, finish,
/// alive; docs/architecture.md has their order. Never waits. Not thread-safe.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::string run_id;
    int nodes = 1;
    int max_restarts = 0;
    std::string master_addr;
    int master_port = 0;
    /// Whether workers use our store; otherwise their rank 0 gets a free port of node 0 for one.
    bool agent_store = true;
    std::chrono::milliseconds join_timeout{600'000};
  };

  /// @param listener listens on the port.
  Coordinator(Options options, base::UniqueFd listener);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Readable when handle() has something to do; besides, it is due at a time.
  int fd() const { return epoll_.get(); }
  Clock::time_point due() const { return due_; }
  void handle();

 private:
  struct Node;

  void take(base::UniqueFd socket, std::string first_bytes);
  void watch(Node& node);
  void handle_node(Node& node);
  void handle_message(Node& node, const nlohmann::json& message);
  void hello(Node& node, const nlohmann::json& message);
  /// Why the newcomer does not fit; empty: it does.
  std::string misfit(const Node& node, const nlohmann::json& message) const;
  void failed(Node& node, const nlohmann::json& message);
  void ended(Node& node, const nlohmann::json& message);
  void lost(Node& node);
  /// It has closed the connection, or has been silent for too long.
  static bool is_gone(const Node& node);
  /// The rank of a node that wants this one, -1: any.
  int rank_for(int wanted) const;

  void find_torchrun_nodes();
  bool is_here(int node) const;
  void enter_torchruns_barrier();
  void leave_torchruns_barrier();

  void handle_times();
  std::string missing() const;
  bool all_here() const;
  bool all_ended() const;
  void start_attempt();
  void start_node(int rank, const AssignedRanks& ranks);
  void end_attempt();
  void fail(int exit_code, bool may_restart, const std::string& text);
  void finish(int exit_code, const std::string& text);
  void send_to_all(const nlohmann::json& message);

  const Options options_;
  const TorchrunKeys torchrun_keys_;
  StoreServer store_;
  base::UniqueFd epoll_;
  std::vector<std::unique_ptr<Node>> newcomers_;  ///< that have not said hello
  std::map<int, std::unique_ptr<Node>> nodes_;    ///< by node rank
  std::map<int, TorchrunRole> torchrun_nodes_;    ///< those that torchrun runs
  Clock::time_point due_;
  Clock::time_point join_deadline_;
  Clock::time_point next_notice_;
  Clock::time_point next_alive_;

  enum class State { kJoining, kRunning, kLeaving, kFinished };
  State state_ = State::kJoining;
  int attempt_ = 0;
  std::optional<MasterPort> workers_port_;  ///< of this attempt, where they have their own store
  // Of the first failure in this attempt.
  bool failed_ = false;
  int exit_code_ = 0;
  bool may_restart_ = false;
  std::string failure_text_;
};

}  // namespace syncbn::launch

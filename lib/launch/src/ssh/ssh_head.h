#pragma once

#include <syncbn/launch/options.h>

#include <chrono>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/signals.h"
#include "output/output.h"
#include "ssh/head_node.h"
#include "ssh/head_plan.h"
#include "ssh/node_lines.h"
#include "ssh/node_message.h"
#include "workers/keeper.h"

namespace syncbn::launch {

/// The launcher that the user starts with a list of hosts. It runs no workers: by ssh, it starts a
/// launcher on each host and waits for all to end. Once all are ready, those launchers form a job
/// as if each had been started by hand, and connect to each other without the head. The head
/// forwards signals and shows the nodes' output.
///
/// A keeper owns the ssh processes. When the head dies, their stdin ends, and so do the nodes.
class SshHead {
 public:
  SshHead(const LaunchOptions& options, const HeadPlan& plan);
  SshHead(const SshHead&) = delete;
  SshHead& operator=(const SshHead&) = delete;

  /// Returns the exit code: of the first worker that failed; 75 if a connection was lost; 128 + the
  /// signal that ended the job. If nothing was started, that of the first host with a problem.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  void start();
  /// Whether all nodes are.
  bool wait_until_ready();
  void report_problems();
  void let_begin();
  void wait_for_end();
  /// When to give up nodes that have not ended.
  Clock::time_point give_up_time() const;
  /// Time after which nodes take a silent node for lost.
  std::chrono::milliseconds silence() const;
  /// The job has ended on one node: limits the wait for the others.
  /// @param until_they_know time until they notice.
  void await_rest(std::chrono::milliseconds until_they_know);
  /// Names the nodes that have not ended, and kills their processes on this machine.
  void give_up_silent();

  /// Waits for events until then and handles them once.
  void turn(Clock::time_point until);
  void handle_signals();
  void end_by_signal(int signal);
  void pass_on(int signal);
  void handle_event(const KeeperEvent& event);
  void node_ended(HeadNode& node, int status);
  bool read_stream(size_t index, Stream stream);
  void drain(size_t index);
  NodeLines::Sinks sinks(size_t index);
  void take_line(size_t index, std::string_view line);
  void take_message(size_t index, std::string_view text);
  /// Whether the message is valid in this state.
  bool handle_message(size_t index, const NodeMessage& message);
  void give_up(HeadNode& node, std::string_view message);
  void send_to_all(const nlohmann::json& message);

  int exit_code() const;
  /// The report about the job, in JSON.
  std::string report(int exit_code) const;

  const LaunchOptions& options_;
  const HeadPlan& plan_;
  const std::string mark_;
  std::vector<HeadNode> nodes_;
  Signals signals_;
  Output output_;
  std::unique_ptr<Keeper> keeper_;
  int master_port_ = 0;
  bool begun_ = false;  ///< the nodes have got their go
  int first_failure_ = 0;
  bool lost_any_ = false;
  std::string report_;  ///< from the node that failed first
  Clock::time_point next_alive_;
  std::optional<int> ended_by_signal_;
  std::optional<Clock::time_point> give_up_at_;  ///< after a signal
  Clock::time_point heard_;                      ///< when a node last sent anything
  std::optional<std::chrono::milliseconds>
      patience_;  ///< with silent nodes; empty while the job runs
};

}  // namespace syncbn::launch

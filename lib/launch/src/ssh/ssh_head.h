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
#include "ssh/node_protocol.h"
#include "workers/keeper.h"

namespace syncbn::launch {

/// The launcher that somebody started with a list of hosts: it runs no workers, but on each host a
/// launcher that does, by ssh, and stays with them to their end. Once all hosts have said that they
/// are ready, those launchers are the nodes of a job as if each had been started by hand; they talk
/// to each other without the head. The head passes signals on and shows what they write.
///
/// A keeper owns the ssh processes. When the head dies, their stdin ends, and so do the nodes.
class SshHead {
 public:
  SshHead(const LaunchOptions& options, const HeadPlan& plan);
  SshHead(const SshHead&) = delete;
  SshHead& operator=(const SshHead&) = delete;

  /// The exit code: that of the first worker that failed, as the nodes tell it; 75 when a
  /// connection broke; 128 + the signal that ended the job. Before anything has started that of the
  /// first host with a problem.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  void start();
  /// Whether all are.
  bool wait_until_ready();
  void report_problems();
  void let_begin();
  void wait_for_end();
  /// When nodes that have not ended are given up.
  Clock::time_point give_up_time() const;
  /// After which nodes take each other for lost.
  std::chrono::milliseconds silence() const;
  /// The job is over on one node, and so it soon is on the others. @param until_they_know of it.
  void await_rest(std::chrono::milliseconds until_they_know);
  /// Names the nodes that have not ended by then, and kills what there is of them on this machine.
  void give_up_silent();

  /// Handles what happens until then, once.
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
  /// Whether the message means something now.
  bool handle_message(size_t index, const NodeMessage& message);
  void give_up(HeadNode& node, std::string_view message);
  void send_to_all(const nlohmann::json& message);

  int exit_code() const;
  /// Of the job, in JSON.
  std::string report(int exit_code) const;

  const LaunchOptions& options_;
  const HeadPlan& plan_;
  const std::string mark_;
  std::vector<HeadNode> nodes_;
  Signals signals_;
  Output output_;
  std::unique_ptr<Keeper> keeper_;
  int master_port_ = 0;
  bool begun_ = false;  ///< the nodes have been let begin
  int first_failure_ = 0;
  bool lost_any_ = false;
  std::string report_;  ///< of the node that failed first
  Clock::time_point next_alive_;
  std::optional<int> ended_by_signal_;
  std::optional<Clock::time_point> give_up_at_;        ///< after a signal, whatever they say
  Clock::time_point heard_;                            ///< anything, of any node
  std::optional<std::chrono::milliseconds> patience_;  ///< with silence; nothing while the job runs
};

}  // namespace syncbn::launch

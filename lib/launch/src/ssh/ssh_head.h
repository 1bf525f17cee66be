#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/launch/options.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "common/signals.h"
#include "output/output.h"
#include "ssh/head_plan.h"
#include "ssh/node_protocol.h"
#include "workers/keeper.h"

namespace syncbn::launch {

/// A node's state in the head, with the pipes to its process on this machine: ssh or a launcher.
struct HeadNode {
  enum class State { kAsked, kAnswered, kEnded };

  NodePlan plan;
  NodeLines lines;
  State state = State::kAsked;
  base::Channel in = {};
  OutputPipes pipes = {};
  std::string last_words = {};  ///< the last line on its stderr before the job has begun
  std::optional<int> start_error = {};
  std::optional<int> exit_code = {};  ///< reported by its launcher
  std::optional<NodeProblem> problem = {};
};

/// The launcher that the user starts with a list of hosts. It runs no workers; it starts a launcher
/// on each host by ssh and waits for their end. When all hosts are ready, these launchers are the
/// nodes of an ordinary job and talk to each other directly. The head forwards signals to them and
/// prints their output.
///
/// A keeper owns the ssh processes. If the head dies, their stdin closes, which ends the nodes.
class SshHead {
 public:
  SshHead(const LaunchOptions& options, std::vector<NodePlan> plan);
  SshHead(const SshHead&) = delete;
  SshHead& operator=(const SshHead&) = delete;

  /// Returns the exit code: that of the first worker that failed; 75 if a connection broke; 128 +
  /// the signal that ended the job; before the job has started, that of the first host's problem.
  int run();

 private:
  void start();
  bool wait_until_ready();
  void report_problems();
  void wait_for_end();
  /// One node has ended: limits the time for the others. @param notice_time the time until they
  /// notice.
  void limit_rest(std::chrono::milliseconds notice_time);
  /// Reports the nodes that have not ended, and kills their processes on this machine.
  void give_up_silent();

  /// Polls once, until `until` at the latest, and handles what is ready.
  void poll_once(Clock::time_point until);
  void handle_signals();
  void end_by_signal(int signal);
  void pass_on(int signal);
  void handle_event(const KeeperEvent& event);
  void node_ended(HeadNode& node, int status);
  OutputPipes::Sink sink(size_t index);
  NodeLines::Sinks line_sinks(size_t index);
  void take_line(size_t index, std::string_view line);
  /// Returns false if the message is invalid in this state.
  bool handle_message(size_t index, const NodeMessage& message);
  void give_up(HeadNode& node, std::string_view message);
  void send_to_all(const nlohmann::json& message);

  int exit_code() const;
  std::string report(int exit_code) const;

  const LaunchOptions& options_;
  const std::string mark_;
  std::vector<HeadNode> nodes_;
  Signals signals_;
  Output output_;
  std::unique_ptr<Keeper> keeper_;
  int master_port_ = 0;
  bool begun_ = false;  ///< all nodes were ready and have got "go"
  int first_failure_ = 0;
  bool lost_any_ = false;
  std::string report_;  ///< from the node that failed first
  Clock::time_point next_alive_;
  std::optional<int> ended_by_signal_;
  std::optional<Clock::time_point> give_up_at_;  ///< set by a signal; output does not extend it
  Clock::time_point heard_;                      ///< last output of any node
  std::optional<std::chrono::milliseconds> patience_;  ///< silence limit; empty while the job runs
};

}  // namespace syncbn::launch

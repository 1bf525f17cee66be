#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/launch/options.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/clock.h"
#include "common/descriptors.h"
#include "common/handshake.h"
#include "job/job_leader.h"
#include "nodes/node_link.h"
#include "nodes/torchrun.h"

namespace syncbn::launch {

/// The link of a node to the coordinator, which runs on node 0.
class TcpLink : public NodeLink {
 public:
  TcpLink(const LaunchOptions& options, int master_port);

  int fd() const override { return watched_.fd(); }
  Clock::time_point due() const override;
  void handle() override;
  void send(const FromNode& message) override;
  std::unique_ptr<NodeLink> take_successor() override { return std::move(torchrun_); }

  bool is_paused() const override { return paused_; }

  void report_signal(const JobFailure& end) override;
  void report_end(int attempt) override;
  /// Tells node 0, in place of joining, that this node cannot start its workers, which ends the
  /// job. Returns when node 0 has answered, or after 10 s.
  void report_no_start(int exit_code, const std::string& what);

 private:
  void connect();
  void finish_connecting();
  void send_hello();
  void handle_messages();
  void shake_hands();
  void handle_message(const ToNode& message);
  void watch();
  void lose_coordinator();
  /// Returns whether torchrun runs node 0.
  bool find_torchrun();
  using NodeLink::end;
  void end(const JobFailure& failure) override;

  const LaunchOptions& options_;
  const int port_;
  WatchSet watched_{"cannot watch the connection to node 0"};
  base::UniqueFd connecting_;
  std::optional<base::Channel> link_;
  std::unique_ptr<TorchrunLink> torchrun_;  ///< which runs node 0
  std::string connect_error_;
  size_t next_address_ = 0;  ///< index of the next address of node 0 to try
  bool resolve_error_said_ = false;
  Handshake handshake_;                            ///< of the current connection
  std::unique_ptr<base::MessageSeal> protection_;  ///< once the handshake is done
  bool accepted_ = false;                          ///< the coordinator has answered

  Clock::time_point join_deadline_;
  std::optional<Clock::time_point> next_try_ = Clock::now();
  Clock::time_point next_notice_ = Clock::now() + JobLeader::kNoticePeriod;
  Clock::time_point next_alive_;
  Clock::time_point heard_ = Clock::now();
  bool paused_ = false;  ///< the coordinator's process is stopped

  std::chrono::milliseconds alive_period_;
  std::chrono::milliseconds silence_;
  const Clock::time_point reopened_by_;
  int times_dropped_ = 0;  ///< connections that node 0 has closed before it had answered
  std::optional<JobFailure> left_by_signal_;
  std::optional<Refuse> no_start_;  ///< why this node cannot start its workers
};

}  // namespace syncbn::launch

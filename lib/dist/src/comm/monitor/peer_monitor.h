#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "monitor/flight_recorder.h"
#include "monitor/monitor_channel.h"

namespace syncbn::dist::detail {

/// Knows within a moment which rank of the world has ended, compares what ranks wait for, and asks
/// where the others are. What waits for a rank that is gone is broken off, and those who wait learn
/// why: Gloo would wait until the timeout for a neighbour that waits itself, and its neighbours
/// would say no more than "Connection closed by peer". Once rank 0 has left nobody passes news on.
/// Thread-safe.
class PeerMonitor {
 public:
  /// Every rank of the world calls it, where all of them are processes of this library.
  /// @param address under which other hosts reach this one.
  /// @throws base::UnavailableError when rank 0 does not answer within `limit`.
  static std::shared_ptr<PeerMonitor> join(c10d::Store& store, int rank, int world_size,
                                           const std::string& address,
                                           std::chrono::milliseconds limit);

  /// Takes leave: what others still call with this rank fails.
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  /// This process is about to end with that code, in a way that tells nobody of it, as quick_exit()
  /// does. Nothing happens where there is no watch.
  static void leave_with(int exit_code);

  int rank() const { return channel_.rank(); }
  int world_size() const { return channel_.world_size(); }

  /// Looks after a group's calls while the log lives.
  void add(const std::shared_ptr<FlightRecorder>& log);

  /// Which of these ranks has ended first, in words; empty: none that is known of. Waits for news
  /// for up to `patience`.
  std::string end_among(const std::vector<int>& ranks, std::chrono::milliseconds patience);

  /// Why a call failed.
  struct Cause {
    std::string text;             ///< empty when it is not known
    bool ranks_disagree = false;  ///< they called different things
  };

  /// Waits for news for a second or two, where they are not there yet.
  /// @param reason in the words of the library that failed.
  Cause cause_of(const FlightRecorder& log, const Call& call, const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  using Logs = std::vector<std::shared_ptr<FlightRecorder>>;
  using Completed = std::map<std::string, uint64_t>;

  /// What a rank says when it leaves: how, and the collectives it has done its part in, by group.
  struct LeaveNotice {
    std::string manner;
    Completed completed;
  };
  /// The end of a rank.
  struct End {
    std::string what;  ///< "rank 2 (host, process 7) died"
    Clock::time_point when;
    Completed completed;
    uint64_t order = 0;  ///< among all news
  };
  /// Why a group cannot go on.
  struct Failure {
    std::string what;
    bool ranks_disagree = false;
    Clock::time_point speak_at{};
    uint64_t order = 0;  ///< among all news
  };
  /// A collective in which some rank has waited for a while.
  struct Stuck {
    std::string who;
    uint64_t fingerprint = 0;
    std::string call;
  };
  /// The same for a send or recv with this rank.
  struct StuckTransfer {
    int peer = -1;
    std::string who;
    std::string name;
    uint64_t tag = 0;
    uint64_t dtype = 0;
    uint64_t elements = 0;
    std::string call;
  };

  PeerMonitor(c10d::Store& store, int rank, int world_size, const std::string& address,
              std::chrono::milliseconds limit);

  void leave(const std::string& manner);
  static void leave_at_exit(int status, void* unused);
  static void leave_at_quick_exit();

  // Called by the channel's thread.
  void on_message(const Message& message);
  void on_end(int rank, const std::string& where);
  void supervise();

  // With the lock held.
  void answer(const Message& question);
  void record_leave_notice(const Message& notice);
  void receive_stuck(const Message& report);
  void receive_failure(const std::string& type, const std::string& group, const std::string& what);
  void find_failure(const std::string& type, const std::string& group, const std::string& what);
  void record_end(int rank, const std::string& where, LeaveNotice notice);
  void record_failure(const std::string& group, Failure failure);
  Logs logs_now();
  void report_stuck(const FlightRecorder& log, const std::vector<FlightRecorder::Pending>& pending);
  void compare_with_stuck(const FlightRecorder& log,
                          const std::vector<FlightRecorder::Pending>& pending);
  void disagree(const FlightRecorder& log, const std::string& text);
  bool is_lost(const FlightRecorder& log, const FlightRecorder::Pending& pending) const;
  static bool concerns(int rank, const End& end, const FlightRecorder& log, const Call& call);
  std::optional<Failure> known_failure(const FlightRecorder& log, const Call& call) const;
  std::string whereabouts(Lock& lock, const FlightRecorder& log, const Call& call);

  std::string self() const;

  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::vector<std::weak_ptr<FlightRecorder>> logs_;
  std::map<int, LeaveNotice> leave_notices_;
  std::map<int, End> ends_;
  std::map<std::string, Failure> failures_;                 ///< by group: the first
  std::map<std::string, std::map<uint64_t, Stuck>> stuck_;  ///< by group and sequence: the first
  std::map<std::string, StuckTransfer> stuck_transfers_;    ///< by group: the latest
  std::map<std::string, uint64_t> reported_;                ///< by group: reported as stuck
  std::map<std::string, uint64_t> reported_transfers_;      ///< the same
  std::map<uint64_t, std::map<int, std::string>> answers_;  ///< by question
  uint64_t questions_ = 0;
  uint64_t events_ = 0;
  bool has_left_ = false;
  MonitorChannel channel_;  ///< the last, since its thread uses all the others
};

}  // namespace syncbn::dist::detail

#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "monitor/completion_queries.h"
#include "monitor/flight_recorder.h"
#include "monitor/monitor_channel.h"

namespace syncbn::dist::detail {

/// Detects within a second which rank of the world has ended, compares the calls in which ranks
/// wait, and asks ranks how far they are. It aborts calls that wait for a dead rank and names the
/// cause: Gloo would wait until the timeout, or report "Connection closed by peer". After rank 0
/// has left, it detects nothing. Thread-safe.
class PeerMonitor {
 public:
  /// Every rank of the world calls it, if all of them run this library.
  /// @param address of this host, for other hosts.
  /// @throws as MonitorChannel's constructor; base::UnavailableError if the store fails.
  static std::shared_ptr<PeerMonitor> join(c10d::Store& store, int rank, int world_size,
                                           const std::string& address,
                                           std::chrono::milliseconds limit);

  /// Sends a leave notice: calls that other ranks still make with this rank fail.
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  /// Sends a leave notice with the exit code with which this process is about to end. exit() calls
  /// it with its code, quick_exit() with 0. Does nothing if there is no monitor.
  static void leave_with(int exit_code);

  /// From now on, exit() sends the leave notice and ends the process without static destructors.
  static void skip_destructors();

  /// As skip_destructors(), for exit codes other than 0: while calls on GPUs are pending, threads
  /// of NCCL and libtorch crash in the static destructors.
  static void skip_destructors_after_failure();

  int rank() const { return channel_.rank(); }
  int world_size() const { return channel_.world_size(); }

  /// Monitors a group's calls as long as its recorder lives.
  void add(const std::shared_ptr<FlightRecorder>& log);

  /// Tells the other ranks that this rank makes no more calls. It stays connected, and its calls
  /// that run on a GPU go on.
  void announce_leave();

  /// Whether the connection of one of these ranks ended at least `grace` ago.
  bool has_lost(const std::vector<int>& ranks, std::chrono::milliseconds grace);

  /// Describes the first of these ranks that has ended; waits for one for up to `patience`, and
  /// returns an empty string if none has ended by then.
  std::string end_among(const std::vector<int>& ranks, std::chrono::milliseconds patience);

  struct Cause {
    std::string text;             ///< empty if unknown
    bool ranks_disagree = false;  ///< the ranks made different calls
  };

  /// The cause of the failure of `call`; waits for it for up to 2 s.
  /// @param reason the message of the library that failed
  /// @param timed_out whether `call` timed out; then asks the other ranks how far they are
  Cause cause_of(const FlightRecorder& log, const Call& call, const std::string& reason,
                 bool timed_out);

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  using Logs = std::vector<std::shared_ptr<FlightRecorder>>;
  /// The held mutex, and the groups' logs, which it drops after the mutex: the last reference to a
  /// log frees the group's tensors and joins its threads, which wait for the GIL, and a thread that
  /// holds the GIL may wait for this mutex.
  struct Held {
    Logs logs;
    Lock lock;
  };

  /// Registers, once, what exit() does first: with a monitor or, in a group of one, without.
  static void handle_exit();
  using Completed = std::map<std::string, uint64_t>;

  struct LeaveNotice {
    std::string manner;
    Completed completed;  ///< see add_completed()
  };
  struct End {
    std::string what;  ///< "rank 2 (host, process 7) died"
    Clock::time_point when;
    Completed completed;
    uint64_t order = 0;  ///< among ends and failures
  };
  /// Why a group cannot go on.
  struct Failure {
    std::string what;
    bool ranks_disagree = false;
    Clock::time_point report_at{};  ///< see kParentNoticesTime
    uint64_t order = 0;             ///< among ends and failures
  };
  /// A collective in which a rank has waited for kStuckTime.
  struct Stuck {
    std::string who;
    uint64_t fingerprint = 0;
    std::string call;
  };
  /// A send to this rank, or a recv from it, in which the peer has waited for kStuckTime.
  struct StuckTransfer {
    int peer = -1;
    std::string who;
    std::string name;
    uint64_t tag = 0;
    uint64_t dtype = 0;
    uint64_t elements = 0;
    std::string call;
    uint64_t with_peer = 0;  ///< as in Call
  };

  PeerMonitor(c10d::Store& store, int rank, int world_size, const std::string& address,
              std::chrono::milliseconds limit);

  void leave(const std::string& manner);

  // Called by the channel's thread.
  void on_message(const Message& message);
  void on_end(int rank, const std::string& where);
  void supervise();

  Logs logs_now();
  Held hold();

  // With the lock held.
  void add_completed(const Logs& logs, bool with_running, std::vector<std::string>& fields);
  void answer(const Message& question, const Logs& logs);
  static Completed completed_of(const Message& notice);
  void receive_stuck(const Message& report);
  void receive_failure(const std::string& type, const std::string& group, const std::string& what,
                       const Logs& logs);
  void report_failure(const std::string& type, const std::string& group, const std::string& what,
                      const Logs& logs);
  void report_stuck(const FlightRecorder& log, const std::vector<FlightRecorder::Pending>& pending);
  void report_transport_error(const FlightRecorder& log, const Logs& logs);
  void give_up_overdue(const std::shared_ptr<FlightRecorder>& log,
                       const std::vector<FlightRecorder::Pending>& pending);
  void compare_with_stuck(const FlightRecorder& log,
                          const std::vector<FlightRecorder::Pending>& pending, const Logs& logs);
  bool is_lost(const FlightRecorder& log, const FlightRecorder::Pending& pending) const;
  bool concerns(int rank, const End& end, const FlightRecorder& log, const Call& call) const;
  std::optional<Failure> known_failure(const FlightRecorder& log, const Call& call) const;
  std::string ask_ranks(Lock& lock, const FlightRecorder& log, const Call& call);

  std::string self() const;

  const pid_t process_;
  std::mutex mutex_;  ///< guards the members below, but for the last two
  std::condition_variable news_;
  std::vector<std::weak_ptr<FlightRecorder>> logs_;
  std::map<int, LeaveNotice> leave_notices_;
  std::map<int, End> ends_;
  std::map<int, Clock::time_point> disconnected_;           ///< by rank
  std::map<std::string, Failure> failures_;                 ///< by group: the first
  std::map<std::string, std::map<uint64_t, Stuck>> stuck_;  ///< by group and sequence: the first
  std::map<std::string, StuckTransfer> stuck_transfers_;    ///< by group: the latest
  std::map<std::string, uint64_t> reported_;  ///< by group: the last collective reported as stuck
  std::map<std::string, uint64_t> reported_transfers_;      ///< by group: the last send or recv
  std::map<uint64_t, std::map<int, std::string>> answers_;  ///< by question and rank
  uint64_t questions_ = 0;
  uint64_t events_ = 0;
  bool has_left_ = false;
  std::map<std::string, std::thread> overdue_;  ///< by group: asks for the cause
  CompletionQueries queries_;
  MonitorChannel channel_;  ///< last, because its thread uses the members above
};

}  // namespace syncbn::dist::detail

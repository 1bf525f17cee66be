#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <syncbn/base/flight_record.h>
#include <syncbn/dist/collectives.h>

#include "monitor/trace.h"

namespace syncbn::dist::detail {

/// A collective, send or recv, as this rank called it.
struct Call {
  const char* name = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  /// The number of the collective in its group, from 1; sends and recvs are counted separately.
  uint64_t sequence = 0;
  int peer = -1;  ///< of a send or recv, in the world; -1 for collectives
  /// The number of the send to this peer, or of the recv from it, from 1.
  uint64_t with_peer = 0;
  int tag = 0;         ///< of a send or recv
  int root = -1;       ///< in the group; -1: none
  int reduce_op = -1;  ///< c10d::ReduceOp's number; -1: none
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes;  ///< of the tensor
  bool has_sizes = false;              ///< all ranks must have the same `sizes`
  /// Of a coalesced call: its tensors after the first, as ", Float [8]".
  std::optional<std::string> others;

  bool is_collective() const { return peer < 0; }
  int64_t elements() const;
  /// A hash of what must be equal on all ranks.
  uint16_t fingerprint() const;
  /// "all_reduce of Float [2, 3]".
  std::string describe() const;
  /// "all_reduce #2".
  std::string numbered() const;
};

/// While it lives, this thread's calls are recorded under the name and sizes of the function that
/// the user called. The outermost one counts.
class NamedAs {
 public:
  NamedAs(const char* name, at::IntArrayRef sizes);
  ~NamedAs();
  NamedAs(const NamedAs&) = delete;
  NamedAs& operator=(const NamedAs&) = delete;

  /// Renames a call of this thread, if it has a NamedAs.
  static void apply_to(Call& call);

 private:
  static thread_local const NamedAs* current_;
  const char* const name_;
  const at::IntArrayRef sizes_;
};

/// Records the calls of this rank in one group: the latest ones for the PeerMonitor's thread, which
/// reads them here, and all of them for the process's base::FlightRecord and for a CallTrace.
/// Thread-safe.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Number of collectives to keep: more than a group makes on a GPU between two calls of update().
  static constexpr size_t kKept = 2048;

  struct Pending {
    Call call;
    Clock::time_point since;
    Timeout timeout = std::nullopt;  ///< as of begin()
  };
  using Abort = std::function<void(std::optional<Clock::time_point> awaited_since)>;
  /// How to ask a call whether it has ended. May own the last reference to its tensors.
  struct Completion {
    std::function<bool()> is_done = {};
    std::function<std::chrono::nanoseconds()> time_on_gpu = {};
  };

  /// @param ranks the group's, in the world.
  /// @param abort makes all pending calls fail, without waiting for that. Its argument says since
  ///   when a thread has waited for a call on the CPU; empty: none waits.
  /// @param record also gets the calls, for the launcher and `syncbn-launch explain`; may be null.
  FlightRecorder(std::string group, std::vector<int> ranks, Abort abort,
                 std::shared_ptr<base::FlightRecord> record = nullptr);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  const std::string& group() const { return group_; }
  const std::vector<int>& ranks() const { return ranks_; }
  bool has_member(int rank) const;
  /// Aborts the group because the call cannot succeed.
  void abort(const Call& call);

  /// Call::with_peer of the next send to this rank, or recv from it.
  uint64_t next_with(int peer, c10d::OpType type) const;
  /// Only succeed() and fail() end the call, unless set_completion() follows.
  /// @param timeout of a call on a GPU, which the PeerMonitor enforces because no thread waits for
  ///   it.
  /// @param traced_since when the caller began, from trace_time().
  /// @return the completion of the oldest call, which is no longer kept, to be destroyed without a
  ///   lock
  Completion begin(const Call& call, Timeout timeout = std::nullopt,
                   int64_t traced_since = trace_time());
  /// Reports that the call has started.
  /// @param is_done returns whether the call has ended; throws if the transport has failed. Any
  ///   thread may call it. Empty: the call counts as ended.
  /// @param time_on_gpu returns how long the call took on the GPU, once it has ended; may be empty.
  void set_completion(const Call& call, std::function<bool()> is_done,
                      std::function<std::chrono::nanoseconds()> time_on_gpu = nullptr);
  /// Reports that a thread waits for the call from now on.
  /// @param is_blocked the thread does nothing else; otherwise it waits for a future, as DDP does
  ///   at the end of its backward.
  void await(const Call& call, bool is_blocked = true);
  void succeed(const Call& call, std::chrono::nanoseconds on_gpu = {});
  void fail(const Call& call);
  /// Removes a call that did not start, because its arguments were refused; the group can go on.
  void refuse(const Call& call);

  /// Reports that a call has failed. Later ones must then fail as well: ranks may be out of step.
  /// @param call not given: one of another rank
  void set_failed(const Call& call = {});
  /// The call that failed first; number 0: one of another rank.
  std::optional<Call> failed() const;

  /// Reports that this rank shuts the group down, which makes its pending calls fail.
  void close();
  /// Whether close() was called before any call failed.
  bool was_closed() const;

  /// Asks which pending calls have ended. It asks without holding the lock.
  void update();
  /// As of the last update().
  std::vector<Pending> pending() const;
  /// The first exception that a call's `is_done` threw.
  struct TransportError {
    std::string what;
    Call call;
    Clock::time_point when;
  };
  std::optional<TransportError> transport_error() const;
  /// A collective; empty if it was not called, or is no longer kept.
  std::optional<Call> find(uint64_t sequence) const;
  std::optional<Call> last_collective() const;
  /// The highest number up to which every collective has succeeded on this rank, as of the last
  /// update().
  /// @param with_running counts collectives that run on a GPU as well: they need no thread of this
  ///   process
  uint64_t completed(bool with_running = false) const;
  /// Numbers of sends to a rank, or of recvs from it.
  struct Transfers {
    uint64_t begun = 0;
    uint64_t done = 0;  ///< succeeded, or run on a GPU
  };
  /// By the peer and c10d::OpType.
  using TransfersByRank = std::map<std::pair<int, c10d::OpType>, Transfers>;
  TransfersByRank transfers() const;

 private:
  enum class State { kPending, kSucceeded, kFailed };
  struct Entry {
    Call call;
    Clock::time_point since;
    Completion completion = {};
    Timeout timeout;
    State state = State::kPending;
    uint64_t number = 0;  ///< in the base::FlightRecord; 0: not in it
    bool is_awaited = false;
    Clock::time_point awaited_since = {};
    int64_t traced_since = 0;   ///< Unix time, ns; 0: it is not traced
    int64_t blocked_since = 0;  ///< when a thread blocked on it, as traced_since; 0: none did

    bool runs_on_gpu() const { return timeout.has_value(); }
    bool is_pending() const { return state == State::kPending; }
  };
  Entry* entry_of(const Call& call);
  uint64_t begin_in_record(const Call& call);
  /// @return the entry's completion, which the caller destroys after it has released the lock
  [[nodiscard]] Completion end(Entry& entry, State state, std::chrono::nanoseconds on_gpu = {});
  /// Adds the call, as ending now, to the CallTrace if there is one.
  void trace(const Entry& entry) const;
  template <class Visit>
  void visit_pending(const Visit& visit) const;
  uint64_t oldest() const { return last_ > kKept ? last_ - kKept + 1 : 1; }

  const std::string group_;
  const std::vector<int> ranks_;
  const Abort abort_;
  const std::shared_ptr<base::FlightRecord> record_;
  const size_t group_in_record_;
  /// Guards the members below. No Completion is destroyed under it: that may free a tensor of
  /// Python, which waits for the GIL, and a thread that holds the GIL may wait for this mutex.
  mutable std::mutex mutex_;
  std::array<Entry, kKept> collectives_;  ///< number n is at n % kKept
  uint64_t last_ = 0;
  std::list<Entry> transfers_;  ///< pending sends and recvs
  TransfersByRank transfers_by_rank_;
  std::optional<TransportError> transport_error_;
  std::optional<Call> failed_;
  bool was_closed_ = false;
};

}  // namespace syncbn::dist::detail

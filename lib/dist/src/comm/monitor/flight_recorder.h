#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// A collective, send or recv, as this rank called it.
struct Call {
  const char* name = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  /// The number of the collective in its group, from 1; sends and recvs are counted separately.
  uint64_t sequence = 0;
  int peer = -1;       ///< of a send or recv, in the world; -1 for collectives
  int tag = 0;         ///< of a send or recv
  int root = -1;       ///< in the group; -1: none
  int reduce_op = -1;  ///< c10d::ReduceOp's number; -1: none
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes;  ///< of the tensor
  bool has_sizes = false;              ///< all ranks must have the same `sizes`

  bool is_collective() const { return peer < 0; }
  int64_t elements() const;
  /// A hash of what must be equal on all ranks.
  uint16_t fingerprint() const;
  /// "all_reduce of Float [2, 3]".
  std::string describe() const;
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

/// The latest calls of this rank in one group. Thread-safe: the PeerMonitor's thread reads it.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Number of collectives: more than a step of ResNet-152 has in one group.
  static constexpr size_t kKept = 512;

  struct Pending {
    Call call;
    Clock::time_point since;
    Timeout timeout = std::nullopt;  ///< as of begin()
  };

  /// @param ranks the group's, in the world.
  /// @param abort makes all pending calls fail, and does not wait for that.
  FlightRecorder(std::string group, std::vector<int> ranks, std::function<void()> abort);

  const std::string& group() const { return group_; }
  const std::vector<int>& ranks() const { return ranks_; }
  bool has_member(int rank) const;
  /// Aborts the group, since the call cannot succeed.
  void abort(const Call& call);

  /// Again for the same call: replaces what it was begun with.
  /// @param is_done whether the call has ended; empty if only succeed() and fail() end it. May be
  ///   called by any thread. Throws if the transport has failed.
  /// @param timeout of a call for which no thread waits, so that the PeerMonitor has to.
  void begin(const Call& call, std::function<bool()> is_done, Timeout timeout = std::nullopt);
  void succeed(const Call& call);
  void fail(const Call& call);
  /// The call did not start: its arguments were refused, and the group goes on.
  void refuse(const Call& call);

  /// A call has failed, so later ones must: ranks may be out of step.
  /// @param call not given: one of another rank
  void set_failed(const Call& call = {});
  /// The call that failed first; number 0: one of another rank.
  std::optional<Call> failed() const;

  /// Asks which pending calls have ended. While it does so, no lock is held.
  void update();
  /// As of the last update().
  std::vector<Pending> pending() const;
  /// What `is_done` of a call has thrown first.
  struct TransportError {
    std::string what;
    Call call;
    Clock::time_point when;
  };
  std::optional<TransportError> transport_error() const;
  /// A collective; empty if it was not called, or is no longer kept.
  std::optional<Call> find(uint64_t sequence) const;
  std::optional<Call> last_collective() const;
  /// Every collective up to this number has succeeded on this rank, as of the last update().
  /// @param with_running or runs on a GPU, which needs no thread of this process
  uint64_t completed(bool with_running = false) const;

 private:
  enum class State { kPending, kSucceeded, kFailed };
  struct Entry {
    Call call;
    Clock::time_point since;
    std::function<bool()> is_done;
    Timeout timeout;
    State state = State::kPending;

    bool is_pending() const { return state == State::kPending; }
  };
  Entry* entry_of(const Call& call);
  std::vector<Entry> pending_entries() const;
  uint64_t oldest() const { return last_ > kKept ? last_ - kKept + 1 : 1; }

  const std::string group_;
  const std::vector<int> ranks_;
  const std::function<void()> abort_;
  mutable std::mutex mutex_;
  std::array<Entry, kKept> collectives_;  ///< number n is at n % kKept
  uint64_t last_ = 0;
  std::list<Entry> transfers_;  ///< pending sends and recvs
  std::optional<TransportError> transport_error_;
  std::optional<Call> failed_;
};

}  // namespace syncbn::dist::detail

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

namespace syncbn::dist::detail {

/// One collective, or one send or recv, as this rank called it.
struct Call {
  const char* name = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  /// Counts the group's collectives from 1, and apart from them its sends and recvs.
  uint64_t sequence = 0;
  /// The rank of the world at the other end of a send or recv; -1 for collectives.
  int peer = -1;
  int tag = 0;  ///< of a send or recv
  /// The rank of the group that a broadcast, reduce, gather or scatter goes from or to; -1: none.
  int root = -1;
  /// c10d::ReduceOp's number; -1 where nothing is reduced.
  int reduce_op = -1;
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// Of the tensor that has to be the same on all ranks, when `has_sizes`.
  c10::SmallVector<int64_t, 5> sizes;
  bool has_sizes = false;

  bool is_collective() const { return peer < 0; }
  int64_t elements() const;
  /// Equal on ranks that called the same.
  uint16_t fingerprint() const;
  /// "all_reduce of Float [2, 3]".
  std::string describe() const;
};

/// While it lives, this thread's calls go by the name and sizes of what its user called. The
/// outermost one counts.
class NamedAs {
 public:
  NamedAs(const char* name, at::IntArrayRef sizes);
  ~NamedAs();
  NamedAs(const NamedAs&) = delete;
  NamedAs& operator=(const NamedAs&) = delete;

  /// To a call of this thread, if there is one of these.
  static void apply_to(Call& call);

 private:
  static thread_local const NamedAs* current_;
  const char* const name_;
  const at::IntArrayRef sizes_;
};

/// What this rank called in one group. Thread-safe: the thread of the PeerMonitor reads it.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// So many of the latest collectives are known.
  static constexpr size_t kKept = 64;

  struct Pending {
    Call call;
    Clock::time_point since;
  };

  /// @param ranks the group's, in the world. @param abort makes all that is pending fail.
  FlightRecorder(std::string group, std::vector<int> ranks, std::function<void()> abort);

  const std::string& group() const { return group_; }
  const std::vector<int>& ranks() const { return ranks_; }
  bool has_member(int rank) const;
  void abort() const { abort_(); }

  /// `work` is the library's own; null where only succeed() and fail() say when the call is over.
  void begin(const Call& call, const c10::intrusive_ptr<c10d::Work>& work);
  void succeed(const Call& call);
  void fail(const Call& call);

  std::vector<Pending> pending() const;
  /// A collective, unless it is long ago.
  std::optional<Call> find(uint64_t sequence) const;
  std::optional<Call> last_collective() const;
  /// All collectives up to this number have succeeded here.
  uint64_t completed() const;

 private:
  enum class State { kUnderWay, kSucceeded, kFailed };
  struct Entry {
    Call call;
    Clock::time_point since;
    c10::weak_intrusive_ptr<c10d::Work> work{c10::intrusive_ptr<c10d::Work>()};
    State state = State::kUnderWay;
    bool has_work = true;

    bool is_pending() const;
  };
  Entry* entry_of(const Call& call);
  uint64_t oldest() const { return last_ > kKept ? last_ - kKept + 1 : 1; }

  const std::string group_;
  const std::vector<int> ranks_;
  const std::function<void()> abort_;
  mutable std::mutex mutex_;
  std::array<Entry, kKept> collectives_;  ///< number n is at n % kKept
  uint64_t last_ = 0;
  std::list<Entry> transfers_;  ///< sends and recvs under way
};

}  // namespace syncbn::dist::detail

#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

/// Merges rows [k, n] of several ranks into one, [1, n]. Associative and commutative except for
/// rounding (Hierarchical merges by host); equal inputs give equal bits.
using MergeRows = c10::function_ref<at::Tensor(const at::Tensor& rows)>;

/// Carries out the calls of one group. Implementations: Gloo, SharedMemory (one host), Hierarchical
/// (shared memory within hosts, Gloo between them), Nccl. Backend chooses by the tensor's device.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Returns the backend on which to start `call`. No other call may be prepared before it starts.
  virtual c10d::Backend& prepare(const Call& call) = 0;

  /// Timeout of calls whose options give none.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// Makes all pending and later calls fail. Thread-safe. With NCCL it may never return.
  virtual void abort() = 0;
  virtual void shutdown() = 0;
  /// Called when the group is destroyed. Calls may be pending, and abort() may still be called.
  virtual void close() {}

  /// Whether gather_in_one_hop() is faster than an all-gather for such rows. Equal on all ranks.
  virtual bool gathers_in_one_hop(size_t /*bytes*/) const { return false; }
  /// A blocking all-gather.
  /// @param all [W, n] on the CPU, contiguous; contains this rank's row.
  /// @param started called as soon as other calls may start.
  virtual void gather_in_one_hop(const Call& /*call*/, const at::Tensor& /*all*/,
                                 std::chrono::milliseconds /*timeout*/,
                                 c10::function_ref<void()> /*started*/) {
    throw base::InternalError("gather_in_one_hop() of a transport that has none");
  }

  /// Calls `allocate`. If the group's options ask for it, the tensors that this allocates on GPUs
  /// lie in memory that is registered with NCCL.
  virtual void allocate_registered(c10::function_ref<void()> allocate) { allocate(); }

  /// Merges the rows of all ranks up a tree. Blocks; the result has equal bits on all ranks.
  /// @param row [1, n] on the CPU, contiguous; may be overwritten.
  /// @param started called as soon as other calls may start.
  virtual at::Tensor merge_in_tree(const Call& /*call*/, const at::Tensor& /*row*/,
                                   MergeRows /*merge*/, std::chrono::milliseconds /*timeout*/,
                                   c10::function_ref<void()> /*started*/) {
    throw base::InternalError("merge_in_tree() of a transport that has none");
  }

  /// True for NCCL: calls run on CUDA streams.
  virtual bool runs_on_streams() const { return false; }
  /// Connects to the other ranks; each of them calls it. Waits for them without a limit.
  virtual void connect() {}
  /// A thread-safe function that returns whether a call has ended. Empty for a call that was only
  /// captured in a CUDA graph.
  virtual std::function<bool()> completion_of(const c10::intrusive_ptr<c10d::Work>& work) const {
    return [weak = c10::weak_intrusive_ptr<c10d::Work>(work)] {
      const auto alive = weak.lock();
      return !alive || alive->isCompleted();
    };
  }
  /// A thread-safe function that returns how long a call that has ended took on its GPU, including
  /// the wait for the other ranks. Empty if the group does not measure it.
  virtual std::function<std::chrono::nanoseconds()> time_on_gpu_of(
      const c10::intrusive_ptr<c10d::Work>& /*work*/) const {
    return nullptr;
  }
  /// The file to which abort() has written the latest calls as the library saw them; may be empty.
  virtual std::string record_of_calls() const { return ""; }
};

/// Equal on ranks that make the same call.
inline uint64_t tag_of(const Call& call) {
  return call.sequence << 16 | call.fingerprint();
}

}  // namespace syncbn::dist::detail

#pragma once

#include <chrono>
#include <cstdint>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

/// Carries out the calls of one group. There are four: Gloo, SharedMemory (all ranks on one host),
/// Hierarchical (shared memory within hosts, Gloo between them) and Nccl. Backend picks one for
/// each call by the tensor's device.
class Transport {
 public:
  virtual ~Transport() = default;

  /// The collectives, and their timeouts, are c10d::Backend's: this returns the one to start `call`
  /// on. No other call may be prepared until it has started.
  virtual c10d::Backend& prepare(const Call& call) = 0;

  /// Where the options of a call give no timeout.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// Makes all pending calls fail, and all later ones. Any thread may call it.
  virtual void abort() = 0;
  virtual void shutdown() = 0;
  /// The group is gone; calls may still be pending, and abort() may still be called.
  virtual void close() {}

  /// Whether gather_in_one_hop() is faster than an all-gather for so many bytes of each rank. The
  /// same on all ranks.
  virtual bool gathers_in_one_hop(size_t /*bytes*/) const { return false; }
  /// An all-gather that the caller waits for at once.
  /// @param all [W, n] on the CPU, contiguous, with this rank's row in its place.
  /// @param started is called as soon as other calls may start.
  virtual void gather_in_one_hop(const Call& /*call*/, const at::Tensor& /*all*/,
                                 std::chrono::milliseconds /*timeout*/,
                                 c10::function_ref<void()> /*started*/) {}

  /// True for NCCL: its works live on CUDA streams, it connects at the first call, and has a
  /// watchdog of its own.
  virtual bool runs_on_streams() const { return false; }
};

/// Equal on ranks that make the same call.
inline uint64_t tag_of(const Call& call) {
  return call.sequence << 16 | call.fingerprint();
}

}  // namespace syncbn::dist::detail

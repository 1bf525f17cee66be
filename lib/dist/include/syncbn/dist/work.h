#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::dist {

/// Upper bound on the time of a collective. Not given: the group's timeout.
using Timeout = std::optional<std::chrono::milliseconds>;

/// An operation that isend(), irecv() or a function named *_async has started. Until wait()
/// returns, leave the input tensors unchanged and the output tensors alone. Use a Work from one
/// thread at a time.
///
/// A Work may be dropped without wait(): the operation continues and keeps its memory until it
/// ends, at the latest in destroy_process_group(). The output tensors are then undefined, and an
/// error is not reported.
class Work {
 public:
  Work() = default;
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Returns when the output tensors hold the result (on CUDA: when the current stream waits for
  /// it). Throws what the blocking function throws. A second call returns at once, or throws the
  /// same exception.
  /// @param timeout if it passes, the operation has failed, and with it the group: later calls on
  ///   this rank throw before they send, and the other ranks' calls fail as well, except one for
  ///   which this rank has already given its data. Not given: only the operation's own timeout
  ///   counts.
  /// @throws base::UserError for a timeout that is not above zero
  virtual void wait(Timeout timeout = std::nullopt) = 0;

  /// Whether wait() would return or throw without waiting for other ranks. Never blocks.
  virtual bool is_completed() = 0;

  /// What wait() throws; null if the operation succeeded or has not completed.
  virtual std::exception_ptr exception() = 0;

  /// Waits, and returns what all_gather() and gather() return; empty for the other functions.
  virtual const std::vector<at::Tensor>& tensors() = 0;

  /// Waits, and returns what the function for bytes returns, one entry for broadcast_bytes() and
  /// scatter_bytes(); empty for the other functions.
  virtual const std::vector<std::string>& bytes() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace syncbn::dist

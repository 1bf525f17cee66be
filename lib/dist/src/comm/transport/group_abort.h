#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "transport/transport.h"

namespace syncbn::dist::detail {

/// Aborts the transports of one group without waiting for them: ncclCommAbort() may wait for other
/// communicators of the device, or hang (nccl issue 863). Held by a shared_ptr. Thread-safe.
class GroupAbort : public std::enable_shared_from_this<GroupAbort> {
 public:
  /// Upper bound on NCCL's abort, and on the calls of NCCL that threads are in.
  static constexpr std::chrono::seconds kLimit{5};

  /// @param cuda null without NCCL
  GroupAbort(std::shared_ptr<Transport> cpu, std::shared_ptr<Transport> cuda)
      : cpu_(std::move(cpu)), cuda_(std::move(cuda)) {}

  /// @param leave ends the process. Called if NCCL has not let go after kLimit: the threads that
  ///   wait for the GPU never return then.
  void set_last_resort(std::function<void()> leave) { leave_ = std::move(leave); }

  /// Starts to abort; NCCL once, the CPU's transport at each call.
  void start();

  /// While it lives, its thread is in a call of NCCL.
  class InCall {
   public:
    explicit InCall(GroupAbort& abort) : abort_(abort) { ++abort_.in_calls_; }
    ~InCall() { --abort_.in_calls_; }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    GroupAbort& abort_;
  };

 private:
  void abort_cuda();

  const std::shared_ptr<Transport> cpu_;
  const std::shared_ptr<Transport> cuda_;
  std::function<void()> leave_;
  std::atomic<bool> has_started_{false};
  std::atomic<bool> has_aborted_{false};
  std::atomic<int> in_calls_{0};
};

}  // namespace syncbn::dist::detail

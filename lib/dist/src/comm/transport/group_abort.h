#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/transport.h"

namespace syncbn::dist::detail {

/// Aborts the transports of one group without waiting for them: ncclCommAbort() may wait for other
/// communicators of the device, or hang (nccl issue 863). Held by a shared_ptr. Thread-safe.
class GroupAbort : public std::enable_shared_from_this<GroupAbort> {
 public:
  /// Upper bound on NCCL's abort, and on calls of NCCL in progress.
  static constexpr std::chrono::seconds kLimit{5};
  /// Upper bound on the time in which the calls of an aborted group on the CPU end.
  static constexpr std::chrono::seconds kCpuLimit{2};

  /// @param cuda null without NCCL
  GroupAbort(std::shared_ptr<Transport> cpu, std::shared_ptr<Transport> cuda)
      : cpu_(std::move(cpu)), cuda_(std::move(cuda)) {}

  /// @param leave ends the process, because what it is given does not return. Called if NCCL's
  ///   abort or a call of NCCL has not returned after kLimit: threads that wait for the GPU then
  ///   never return. Also called if a thread still waits for a call on the CPU after kCpuLimit:
  ///   when a connection breaks in the middle of a message, Gloo leaves the sender or receiver of
  ///   that message waiting for its timeout.
  void set_last_resort(std::function<void(const char* what)> leave) { leave_ = std::move(leave); }

  /// Starts to abort NCCL, at the first call only, and aborts the CPU's transport, at each call.
  /// @param awaited_since when the thread that has waited longest for a call on the CPU began to;
  ///   empty: no thread is known to wait
  void start(std::optional<std::chrono::steady_clock::time_point> awaited_since = {});

  /// While it lives, its thread may be in a call of NCCL.
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
  std::function<void(const char*)> leave_;
  std::atomic<bool> has_started_{false};
  std::atomic<bool> has_aborted_{false};
  std::atomic<int> in_calls_{0};
  std::mutex mutex_;  ///< guards the next member
  std::optional<std::chrono::steady_clock::time_point> cpu_aborted_;
};

}  // namespace syncbn::dist::detail

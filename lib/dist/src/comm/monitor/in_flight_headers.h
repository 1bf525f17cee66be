#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Headers of a group's exchanges on GPUs, on their way between the ranks' processes: to look into
/// the rows themselves would be to wait for the GPU. So a mismatch is found some exchanges later.
/// Thread-safe; ranks send in the same order.
class InFlightHeaders {
 public:
  /// At most so many are under way: then the oldest is waited for, and with it the slowest rank's
  /// process. With the exchanges between them a FlightRecorder holds them all.
  static constexpr size_t kMaxInFlight = 16;

  /// @param most under way; 0: each is waited for at once, where the host waits for GPUs anyway.
  explicit InFlightHeaders(size_t max_in_flight = kMaxInFlight) : max_in_flight_(max_in_flight) {}

  /// Of one exchange: [1, n] on the CPU in. @param called what it is called in errors.
  /// @return [W, n] of each, in order, whose headers have come from all ranks meanwhile.
  /// @throws base::UnavailableError where one did not come in time; what came before it, the call
  ///   before has returned.
  std::vector<at::Tensor> send(const at::Tensor& header, const ProcessGroupPtr& group,
                               Timeout timeout, const char* called);

  /// Nobody asks any more: with what is under way go the connections that it holds.
  void clear();

 private:
  struct Sent {
    at::Tensor all;
    c10::intrusive_ptr<c10d::Work> work;
  };

  const size_t max_in_flight_;
  std::mutex mutex_;
  std::deque<Sent> sent_;
};

}  // namespace syncbn::dist::detail

#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Headers of exchanges on GPUs. They travel between CPUs, because reading them from the GPU would
/// wait for it. One all-gather carries the headers of several exchanges, so a mismatch is found
/// some exchanges later. Thread-safe; ranks send in the same order.
class InFlightHeaders {
 public:
  /// Number of exchanges per all-gather. send() waits for an all-gather after starting the next
  /// one; a FlightRecorder must keep both, and the exchanges between them.
  static constexpr size_t kBatch = 16;

  /// @param batch 1: send() waits for each header, because the exchange waits for GPUs anyway.
  explicit InFlightHeaders(size_t batch = kBatch) : batch_(batch) {}

  size_t batch() const { return batch_; }

  /// @param header of one exchange, [1, n] on the CPU. @param called the exchange's name in errors.
  /// @return [W, n] for each exchange whose headers have all arrived since the last call, in order.
  /// @throws base::UnavailableError if a header did not arrive in time; the previous call has
  ///   returned those before it.
  std::vector<at::Tensor> send(const at::Tensor& header, const ProcessGroupPtr& group,
                               Timeout timeout, const char* called);

  /// Drops the headers in flight, and the connections that they hold.
  void clear();

 private:
  struct Sent {
    at::Tensor all;
    c10::intrusive_ptr<c10d::Work> work;
  };

  const size_t batch_;
  std::mutex mutex_;
  std::vector<at::Tensor> collected_;  ///< fewer than batch_
  std::deque<Sent> sent_;
};

}  // namespace syncbn::dist::detail

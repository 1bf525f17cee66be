#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Headers of exchanges on GPUs. They travel between CPUs: reading the rows would wait for the GPU.
/// One all-gather has those of several exchanges, so a mismatch is found some exchanges later.
/// Thread-safe; ranks send in the same order.
class InFlightHeaders {
 public:
  /// Exchanges of an all-gather. Before the next one starts, send() waits for it; a FlightRecorder
  /// keeps both together with the exchanges between them.
  static constexpr size_t kBatch = 16;

  /// @param batch 1: send() waits for each header; the exchange waits for GPUs anyway.
  explicit InFlightHeaders(size_t batch = kBatch) : batch_(batch) {}

  size_t batch() const { return batch_; }

  /// @param header of one exchange, [1, n] on the CPU. @param called its name in errors.
  /// @return [W, n] for each exchange whose headers have all arrived since the last call, in order.
  /// @throws base::UnavailableError if a header did not arrive in time; the last call has returned
  ///   those before it.
  std::vector<at::Tensor> send(const at::Tensor& header, const ProcessGroupPtr& group,
                               Timeout timeout, const char* called);

  /// Drops what is in flight, with the connections that it holds.
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

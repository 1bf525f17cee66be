#include "monitor/in_flight_headers.h"

#include <utility>

#include <ATen/ops/empty.h>

#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

static_assert(2 * InFlightHeaders::kMaxInFlight <= FlightRecorder::kKept);

std::vector<at::Tensor> InFlightHeaders::send(const at::Tensor& header,
                                              const ProcessGroupPtr& group, Timeout timeout,
                                              const char* called) {
  const std::lock_guard lock(mutex_);
  at::Tensor own = header;
  at::Tensor all = at::empty({group->getSize(), header.size(1)}, header.options());
  c10d::AllgatherOptions options;
  if (timeout) options.timeout = *timeout;
  {
    const NamedAs named(called, header.sizes());
    auto work = group->_allgather_base(all, own, options);
    sent_.push_back({std::move(all), std::move(work)});
  }
  std::vector<at::Tensor> arrived;
  while (!sent_.empty() && (sent_.size() > max_in_flight_ || sent_.front().work->isCompleted())) {
    const Sent& oldest = sent_.front();
    try {
      oldest.work->wait();
    } catch (...) {
      if (!arrived.empty()) break;
      sent_.pop_front();
      throw;
    }
    arrived.push_back(oldest.all);
    sent_.pop_front();
  }
  return arrived;
}

void InFlightHeaders::clear() {
  std::deque<Sent> sent;
  const std::lock_guard lock(mutex_);
  sent.swap(sent_);
}

}  // namespace syncbn::dist::detail

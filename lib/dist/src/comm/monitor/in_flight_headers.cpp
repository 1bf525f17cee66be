#include "monitor/in_flight_headers.h"

#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "monitor/flight_recorder.h"

namespace syncbn::dist::detail {

static_assert(2 * (InFlightHeaders::kBatch + 1) <= FlightRecorder::kKept);

std::vector<at::Tensor> InFlightHeaders::send(const at::Tensor& header,
                                              const ProcessGroupPtr& group, Timeout timeout,
                                              const char* called) {
  const std::lock_guard lock(mutex_);
  collected_.push_back(header);
  if (collected_.size() == batch_) {
    at::Tensor own = at::cat(collected_, 1);
    collected_.clear();
    at::Tensor all = at::empty({group->getSize(), own.size(1)}, own.options());
    const NamedAs named(called, own.sizes());
    c10d::AllgatherOptions options;
    if (timeout) options.timeout = *timeout;
    auto work = group->_allgather_base(all, own, options);
    sent_.push_back({std::move(all), std::move(work)});
  }
  const size_t may_be_in_flight = batch_ > 1 ? 1 : 0;
  std::vector<at::Tensor> arrived;
  while (!sent_.empty() && (sent_.size() > may_be_in_flight || sent_.front().work->isCompleted())) {
    const Sent& oldest = sent_.front();
    try {
      oldest.work->wait();
    } catch (...) {
      if (!arrived.empty()) break;
      sent_.pop_front();
      throw;
    }
    for (const at::Tensor& one : oldest.all.split(header.size(1), 1)) {
      arrived.push_back(one.contiguous());
    }
    sent_.pop_front();
  }
  return arrived;
}

void InFlightHeaders::clear() {
  std::deque<Sent> sent;
  const std::lock_guard lock(mutex_);
  collected_.clear();
  sent.swap(sent_);
}

}  // namespace syncbn::dist::detail

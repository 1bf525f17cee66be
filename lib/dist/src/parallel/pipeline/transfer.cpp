#include "pipeline/transfer.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

namespace syncbn::dist::detail {
namespace {

// Size of a header in int64 values: 1 (0: the sender has failed), samples, whether a backward
// follows, the number of tensors, and for each tensor its dtype, whether it requires a gradient,
// its number of dimensions, and its sizes.
constexpr int64_t kMessageHeader = 128;

at::Tensor header_of(const StageMessage& message) {
  std::vector<int64_t> values{1, message.samples, message.is_training ? 1 : 0,
                              std::ssize(message.tensors)};
  for (const at::Tensor& tensor : message.tensors) {
    if (tensor.layout() != at::kStrided) {
      throw base::UserError("what a stage passes to another rank must be dense; call to_dense()");
    }
    values.push_back(static_cast<int64_t>(tensor.scalar_type()));
    values.push_back(tensor.requires_grad() ? 1 : 0);
    values.push_back(tensor.dim());
    values.insert(values.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  if (std::ssize(values) > kMessageHeader) {
    throw base::UserError(fmt::format(
        "a stage passes {} tensors, more than fit into a header; concatenate or stack some of them",
        message.tensors.size()));
  }
  at::Tensor header = at::zeros({kMessageHeader}, at::kLong);
  std::copy(values.begin(), values.end(), header.mutable_data_ptr<int64_t>());
  return header;
}

/// A message with uninitialised tensors.
/// @throws StageAbandoned if the header is a failure notice
StageMessage message_of(const at::Tensor& header, at::Device device) {
  const int64_t* value = header.const_data_ptr<int64_t>();
  if (*value++ == 0) throw StageAbandoned();
  StageMessage message;
  message.samples = *value++;
  message.is_training = *value++ != 0;
  message.tensors.resize(static_cast<size_t>(*value++));
  for (at::Tensor& tensor : message.tensors) {
    const auto type = static_cast<at::ScalarType>(*value++);
    const bool requires_grad = *value++ != 0;
    const auto dim = static_cast<size_t>(*value++);
    tensor = at::empty(at::IntArrayRef(value, dim), at::TensorOptions(type).device(device));
    tensor.set_requires_grad(requires_grad);
    value += dim;
  }
  return message;
}

}  // namespace

void QueueTransfer::send(const StageMessage& message) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(message);
  }
  changed_.notify_all();
}

StageMessage QueueTransfer::receive(at::Device device) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !waiting_.empty() || has_failed_; });
  if (has_failed_) throw StageAbandoned();
  StageMessage message = std::move(waiting_.front());
  waiting_.pop_front();
  lock.unlock();
  for (at::Tensor& tensor : message.tensors) {
    const bool requires_grad = tensor.requires_grad();
    const at::NoGradGuard no_grad;  // a copy must be a leaf
    tensor = to_stage(tensor, device).set_requires_grad(requires_grad);
  }
  return message;
}

void QueueTransfer::fail() {
  const std::lock_guard lock(mutex_);
  has_failed_ = true;
  changed_.notify_all();
}

RankTransfer::Pending& RankTransfer::send_header(const at::Tensor& header) {
  Pending& pending = sending_.emplace_back();
  pending.works.push_back(isend(header, peer_, group_, tag_, timeout_));
  ++sent_;
  return pending;
}

void RankTransfer::send(const StageMessage& message) {
  Pending& pending = send_header(header_of(message));
  for (const at::Tensor& tensor : message.tensors) {
    pending.works.push_back(isend(tensor.detach(), peer_, group_, tag_ + 1, timeout_));
  }
}

void RankTransfer::fail() {
  send_header(at::zeros({kMessageHeader}, at::kLong));
}

void RankTransfer::start_receiving(Pending& pending) {
  for (const at::Tensor& tensor : pending.tensors) {
    at::Tensor values = tensor.detach();
    pending.works.push_back(irecv(values, peer_, group_, tag_ + 1, timeout_));
  }
}

void RankTransfer::expect(const std::vector<at::Tensor>& like) {
  Pending& pending = expected_.emplace_back();
  for (const at::Tensor& tensor : like) {
    pending.tensors.push_back(at::empty_like(tensor, at::MemoryFormat::Contiguous));
  }
  start_receiving(pending);
}

StageMessage RankTransfer::receive(at::Device device) {
  at::Tensor header = at::empty({kMessageHeader}, at::kLong);
  recv(header, peer_, group_, tag_, timeout_);
  ++received_;
  StageMessage message = message_of(header, device);
  Pending pending{.tensors = message.tensors, .works = {}};
  if (expected_.empty()) {
    start_receiving(pending);
  } else {
    pending = std::move(expected_.front());
    expected_.pop_front();
  }
  for (const WorkPtr& work : pending.works) work->wait();
  message.tensors = pending.tensors;
  return message;
}

void RankTransfer::discard(int64_t sent, at::Device device) {
  while (received_ < sent) {
    try {
      receive(device);
    } catch (const StageAbandoned&) {  // a failure notice
    }
  }
}

void RankTransfer::release(size_t kept) {
  for (; sending_.size() > kept; sending_.pop_front()) {
    for (const WorkPtr& work : sending_.front().works) work->wait();
  }
}

}  // namespace syncbn::dist::detail

#include "pipeline/transfer.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

namespace syncbn::dist::detail {
namespace {

// A header: 1 (0: the sender has failed), the number of tensors, and of each its dtype, whether it
// requires a gradient, and its sizes with their number in front.
constexpr int64_t kMessageHeader = 128;

at::Tensor header_of(const Transfer::Tensors& tensors) {
  std::vector<int64_t> values{1, std::ssize(tensors)};
  for (const at::Tensor& tensor : tensors) {
    values.push_back(static_cast<int64_t>(tensor.scalar_type()));
    values.push_back(tensor.requires_grad() ? 1 : 0);
    values.push_back(tensor.dim());
    values.insert(values.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  if (std::ssize(values) > kMessageHeader) {
    throw base::UserError(fmt::format(
        "{} tensors between two stages on two ranks are too many; put some of them together",
        tensors.size()));
  }
  at::Tensor header = at::zeros({kMessageHeader}, at::kLong);
  std::copy(values.begin(), values.end(), header.mutable_data_ptr<int64_t>());
  return header;
}

/// @throws StageAbandoned
Transfer::Tensors tensors_like(const at::Tensor& header, at::Device device) {
  const int64_t* value = header.const_data_ptr<int64_t>();
  if (*value++ == 0) throw StageAbandoned();
  Transfer::Tensors tensors(static_cast<size_t>(*value++));
  for (at::Tensor& tensor : tensors) {
    const auto type = static_cast<at::ScalarType>(*value++);
    const bool requires_grad = *value++ != 0;
    const auto dim = static_cast<size_t>(*value++);
    tensor = at::empty(at::IntArrayRef(value, dim), at::TensorOptions(type).device(device));
    tensor.set_requires_grad(requires_grad);
    value += dim;
  }
  return tensors;
}

}  // namespace

void QueueTransfer::send(const Tensors& tensors) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(tensors);
  }
  changed_.notify_all();
}

Transfer::Tensors QueueTransfer::receive(at::Device device) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !waiting_.empty() || has_failed_; });
  if (has_failed_) throw StageAbandoned();
  Tensors tensors = std::move(waiting_.front());
  waiting_.pop_front();
  lock.unlock();
  for (at::Tensor& tensor : tensors) {
    const bool requires_grad = tensor.requires_grad();
    const at::NoGradGuard no_grad;  // a copy is a leaf, too
    tensor = tensor.to(device, /*non_blocking=*/true).set_requires_grad(requires_grad);
  }
  return tensors;
}

void QueueTransfer::fail() {
  {
    const std::lock_guard lock(mutex_);
    has_failed_ = true;
  }
  changed_.notify_all();
}

void RankTransfer::send_header(const at::Tensor& header, Message& message) const {
  message.works.push_back(isend(header, peer_, group_, tag_, timeout_));
}

void RankTransfer::send(const Tensors& tensors) {
  Message message;
  send_header(header_of(tensors), message);
  for (const at::Tensor& tensor : tensors) {
    message.works.push_back(isend(tensor.detach(), peer_, group_, tag_ + 1, timeout_));
  }
  sent_.push_back(std::move(message));
}

void RankTransfer::fail() {
  Message message;
  send_header(at::zeros({kMessageHeader}, at::kLong), message);
  sent_.push_back(std::move(message));
}

void RankTransfer::start_receiving(Message& message) {
  for (const at::Tensor& tensor : message.tensors) {
    at::Tensor values = tensor.detach();
    message.works.push_back(irecv(values, peer_, group_, tag_ + 1, timeout_));
  }
}

void RankTransfer::expect(const Tensors& like) {
  Message& message = expected_.emplace_back();
  for (const at::Tensor& tensor : like) {
    message.tensors.push_back(at::empty_like(tensor, at::MemoryFormat::Contiguous));
  }
  start_receiving(message);
}

Transfer::Tensors RankTransfer::receive(at::Device device) {
  at::Tensor header = at::empty({kMessageHeader}, at::kLong);
  recv(header, peer_, group_, tag_, timeout_);
  Message message{.tensors = tensors_like(header, device), .works = {}};
  if (expected_.empty()) {
    start_receiving(message);
  } else {
    message = std::move(expected_.front());
    expected_.pop_front();
  }
  for (const WorkPtr& work : message.works) work->wait();
  return message.tensors;
}

void RankTransfer::release(size_t kept) {
  for (; sent_.size() > kept; sent_.pop_front()) {
    for (const WorkPtr& work : sent_.front().works) work->wait();
  }
}

}  // namespace syncbn::dist::detail

#include "transport/shared_memory.h"

#include <algorithm>
#include <utility>

namespace syncbn::dist::detail::shm {
namespace {

using c10d::OpType;

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided;
}

bool are_alike(const at::Tensor& output, const at::Tensor& input) {
  return is_plain(output) && output.scalar_type() == input.scalar_type() &&
         output.numel() == input.numel();
}

}  // namespace

SharedMemory::SharedMemory(std::shared_ptr<Exchange> exchange, std::shared_ptr<Gloo> gloo)
    : c10d::Backend(gloo->backend()->getRank(), gloo->backend()->getSize()),
      exchange_(std::move(exchange)),
      gloo_(std::move(gloo)) {}

c10d::Backend& SharedMemory::prepare(const Call& call) {
  switch (call.type) {
    case OpType::ALLREDUCE:
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::BROADCAST:
    case OpType::BARRIER:
      tag_ = tag_of(call);
      return *this;
    default:
      return gloo_->prepare(call);
  }
}

void SharedMemory::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  gloo_->set_timeout(timeout);
}

void SharedMemory::abort() {
  exchange_->abort();
  gloo_->abort();
}

void SharedMemory::shutdown() {
  exchange_->stop();
  gloo_->shutdown();
}

SharedMemory::WorkPtr SharedMemory::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  const auto op = options.reduceOp.op_;
  const bool fits = tensors.size() == 1 && is_plain(tensors[0]);
  const Reduce reduce = fits ? find_reduce(tensors[0].scalar_type(), op) : nullptr;
  if (reduce == nullptr) return gloo_->with_tag(tag_).allreduce(tensors, options);
  return start(OpType::ALLREDUCE, make_all_reduce(tensors[0], reduce, op), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const auto fits = [&](const at::Tensor& output) { return are_alike(output, inputs[0]); };
  if (inputs.size() != 1 || outputs.size() != 1 ||
      outputs[0].size() != static_cast<size_t>(size_) || !is_plain(inputs[0]) ||
      !std::all_of(outputs[0].begin(), outputs[0].end(), fits)) {
    return gloo_->with_tag(tag_).allgather(outputs, inputs, options);
  }
  return start(OpType::ALLGATHER, make_all_gather(outputs[0], inputs[0]), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  if (!is_plain(input) || !is_plain(output) || !output.is_contiguous() ||
      output.scalar_type() != input.scalar_type() || output.numel() != input.numel() * size_) {
    return gloo_->with_tag(tag_)._allgather_base(output, input, options);
  }
  return start(OpType::_ALLGATHER_BASE,
               make_all_gather(output.view({size_, input.numel()}).unbind(), input),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0]) || options.rootTensor != 0 ||
      options.rootRank < 0 || options.rootRank >= size_) {
    return gloo_->with_tag(tag_).broadcast(tensors, options);
  }
  return start(OpType::BROADCAST, make_broadcast(tensors[0], static_cast<int>(options.rootRank)),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, make_barrier(), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::start(OpType type, std::unique_ptr<Operation> operation,
                                          std::chrono::milliseconds timeout) {
  auto work = exchange_->start(type, tag_, std::move(operation), or_own(timeout));
  ++calls_;
  return work;
}

std::unique_ptr<Operation> SharedMemory::make_all_reduce(const at::Tensor& tensor, Reduce reduce,
                                                         c10d::ReduceOp::RedOpType op) {
  const int divisor = op == c10d::ReduceOp::AVG ? size_ : 1;
  return all_reduce(exchange_->layout(), size_, tensor, reduce, divisor);
}

std::unique_ptr<Operation> SharedMemory::make_all_gather(Tensors outputs, const at::Tensor& input) {
  return all_gather(exchange_->layout(), std::move(outputs), input);
}

std::unique_ptr<Operation> SharedMemory::make_broadcast(const at::Tensor& tensor, int root) {
  return shm::broadcast(exchange_->layout(), tensor, root);
}

std::unique_ptr<Operation> SharedMemory::make_barrier() {
  return shm::barrier();
}

bool SharedMemory::gathers_in_one_hop(size_t bytes) const {
  // Bytes of all ranks together: each reads them all, while the others wait.
  constexpr size_t kMaxBytes = size_t{256} << 10;
  return bytes <=
         std::min(kMaxBytes / static_cast<size_t>(size_), exchange_->layout().input_bytes());
}

void SharedMemory::gather_in_one_hop(const Call& call, const at::Tensor& all,
                                     std::chrono::milliseconds timeout,
                                     c10::function_ref<void()> started) {
  const auto task = exchange_->begin(tag_of(call), gather_in_place(all), or_own(timeout));
  ++calls_;
  started();
  exchange_->wait(task, kNoTimeout);
}

}  // namespace syncbn::dist::detail::shm

#include "transport/shared_memory.h"

#include <algorithm>
#include <utility>

#include "transport/gloo.h"

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

void SharedMemory::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  if (hosts_->leaders) hosts_->leaders->setTimeout(timeout);
}

void SharedMemory::break_off() {
  exchange_->break_off();
  if (hosts_->leaders) detail::break_off(*hosts_->leaders);
}

void SharedMemory::shutdown() {
  // A leader may be waiting for the others.
  if (!exchange_->is_idle()) break_off();
  exchange_->stop();
}

SharedMemory::WorkPtr SharedMemory::start(OpType type, uint64_t tag,
                                          std::unique_ptr<Operation> operation,
                                          std::chrono::milliseconds timeout) {
  return exchange_->start(type, tag, std::move(operation), or_own(timeout));
}

SharedMemory::WorkPtr SharedMemory::allreduce(uint64_t tag, const Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0])) return {};
  const auto op = options.reduceOp.op_;
  const Reduce reduce = find_reduce(tensors[0].scalar_type(), op);
  if (reduce == nullptr) return {};
  const int divisor = op == c10d::ReduceOp::AVG ? size_ : 1;
  return start(OpType::ALLREDUCE, tag,
               on_one_host() ? all_reduce(setting(), tensors[0], reduce, divisor)
                             : all_reduce(across(tag, options.timeout), tensors[0], reduce, op),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::allgather(uint64_t tag, const std::vector<Tensors>& outputs,
                                              const Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  if (inputs.size() != 1 || outputs.size() != 1 ||
      outputs[0].size() != static_cast<size_t>(size_) || !is_plain(inputs[0])) {
    return {};
  }
  const auto fits = [&](const at::Tensor& output) { return are_alike(output, inputs[0]); };
  if (!std::all_of(outputs[0].begin(), outputs[0].end(), fits)) return {};
  return gather(OpType::ALLGATHER, tag, outputs[0], inputs[0], options.timeout);
}

SharedMemory::WorkPtr SharedMemory::allgather_base(uint64_t tag, const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) {
  if (!is_plain(input) || !is_plain(output) || !output.is_contiguous() ||
      output.scalar_type() != input.scalar_type() || output.numel() != input.numel() * size_) {
    return {};
  }
  return gather(OpType::_ALLGATHER_BASE, tag, output.view({size_, input.numel()}).unbind(), input,
                options.timeout);
}

SharedMemory::WorkPtr SharedMemory::gather(OpType type, uint64_t tag, const Tensors& outputs,
                                           const at::Tensor& input,
                                           std::chrono::milliseconds timeout) {
  return start(type, tag,
               on_one_host() ? all_gather(setting(), outputs, input)
                             : all_gather(across(tag, timeout), outputs, input),
               timeout);
}

SharedMemory::WorkPtr SharedMemory::broadcast(uint64_t tag, const Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0]) || options.rootTensor != 0 ||
      options.rootRank < 0 || options.rootRank >= size_) {
    return {};
  }
  const int root = static_cast<int>(options.rootRank);
  return start(OpType::BROADCAST, tag,
               on_one_host() ? shm::broadcast(setting(), tensors[0], root)
                             : shm::broadcast(across(tag, options.timeout), tensors[0], root),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::barrier(uint64_t tag, const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, tag,
               on_one_host() ? shm::barrier() : shm::barrier(across(tag, options.timeout)),
               options.timeout);
}

bool SharedMemory::gathers_at_once(int64_t bytes) const {
  // Of all ranks together: each reads them all, while the others wait.
  constexpr int64_t kFew = int64_t{256} << 10;
  return on_one_host() &&
         bytes <= std::min(kFew / size_, static_cast<int64_t>(exchange_->layout().input_bytes()));
}

Exchange::TaskPtr SharedMemory::gather_at_once(uint64_t tag, const at::Tensor& all,
                                               std::chrono::milliseconds timeout) {
  return exchange_->begin(tag, gather_in_place(all), or_own(timeout));
}

}  // namespace syncbn::dist::detail::shm

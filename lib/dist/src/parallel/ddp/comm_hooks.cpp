#include <syncbn/dist/comm_hooks.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "ddp/comm_hook_steps.h"

namespace syncbn::dist {
namespace {

using c10::ivalue::Future;

/// A future of convert(tensor) for the tensor of `future`. Passes errors on.
FuturePtr then_tensor(const FuturePtr& future,
                      std::function<at::Tensor(const at::Tensor&)> convert) {
  return future->then(
      [convert = std::move(convert)](Future& done) -> c10::IValue {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        return convert(c10d::detail::parseCppCommHookResult(done.constValue()));
      },
      c10::TensorType::get());
}

CommHook compress_hook(const GroupOrDefault& group, at::ScalarType dtype) {
  return [group, dtype](c10d::GradBucket& bucket) {
    const ProcessGroupPtr on = group.get();
    const at::Tensor buffer = bucket.getBuffer();
    const at::Tensor compressed = buffer.to(dtype).div_(on->getSize());
    return then_tensor(detail::start_all_reduce(compressed, on)->getFuture(),
                       [buffer](const at::Tensor& sum) { return buffer.copy_(sum); });
  };
}

CommHook compress_wrapper(CommHook hook, at::ScalarType dtype) {
  return [hook = std::move(hook), dtype](c10d::GradBucket& bucket) {
    const at::Tensor buffer = bucket.getBuffer();
    at::Tensor compressed = buffer.to(dtype);
    bucket.setBuffer(compressed);
    return then_tensor(hook(bucket),
                       [buffer](const at::Tensor& result) { return buffer.copy_(result); });
  };
}

}  // namespace

namespace detail {

c10::intrusive_ptr<c10d::Work> start_all_reduce(const at::Tensor& tensor,
                                                const ProcessGroupPtr& group, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  return group->allreduce(tensors, options);
}

FuturePtr mean_of(const at::Tensor& buffer, const ProcessGroupPtr& group) {
  // Divide first: a sum of float16 values could overflow.
  buffer.div_(group->getSize());
  return then_tensor(start_all_reduce(buffer, group)->getFuture(),
                     [](const at::Tensor& sum) { return sum; });
}

}  // namespace detail

CommHook allreduce_hook(const GroupOrDefault& group) {
  return [group](c10d::GradBucket& bucket) {
    return detail::mean_of(bucket.getBuffer(), group.get());
  };
}

CommHook fp16_compress_hook(const GroupOrDefault& group) {
  return compress_hook(group, at::kHalf);
}

CommHook bf16_compress_hook(const GroupOrDefault& group) {
  return compress_hook(group, at::kBFloat16);
}

CommHook fp16_compress_wrapper(CommHook hook) {
  return compress_wrapper(std::move(hook), at::kHalf);
}

CommHook bf16_compress_wrapper(CommHook hook) {
  return compress_wrapper(std::move(hook), at::kBFloat16);
}

}  // namespace syncbn::dist

#include "batch_norm/batch_norm_function.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/custom_function.h>

#include "batch_norm/batch_norm_kernels.h"
#include "collectives/gather_rows.h"
#include "ddp/join_statistics.h"

namespace syncbn::dist::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

}  // namespace

void check_input(const BatchNormArguments& arguments) {
  const at::Tensor& input = arguments.input;
  if (input.dim() < 2 || input.dim() > 5) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: expected an input of 2 to 5 dimensions [N, C, ...], got {}",
                    c10::str(input.sizes())));
  }
  if (!input.is_floating_point()) {
    throw base::UserError(fmt::format("SyncBatchNorm: expected a floating-point input, got {}",
                                      c10::toString(input.scalar_type())));
  }
  for (const at::Tensor* tensor :
       {&arguments.weight, &arguments.bias, &arguments.running_mean, &arguments.running_var}) {
    if (!tensor->defined()) continue;
    if (tensor->numel() != input.size(1)) {
      throw base::UserError(
          fmt::format("SyncBatchNorm: the layer has {} channels, the input {} has {}",
                      tensor->numel(), c10::str(input.sizes()), input.size(1)));
    }
    if (tensor->device() != input.device()) {
      throw base::UserError(fmt::format("SyncBatchNorm: the layer is on {}, its input on {}",
                                        tensor->device().str(), input.device().str()));
    }
  }
}

namespace {

/// The ranks' statistics, [W, 2C+1] float64: mean, m2, count.
at::Tensor exchange(const Moments& moments, int64_t count, const ProcessGroupPtr& group) {
  const at::Tensor own_count = at::full({1}, static_cast<double>(count), moments.mean.options());
  const at::Tensor row = at::cat({moments.mean, moments.m2, own_count}).unsqueeze_(0);
  announce_gather(row, group);
  return gather_rows(row, group);
}

/// The sums over all ranks: the same bits on each.
BackwardSums exchange(const BackwardSums& sums, const ProcessGroupPtr& group) {
  const at::Tensor own = at::cat({sums.dy, sums.dy_xmu}).unsqueeze_(0);
  announce_sum(own, group);
  const auto halves = sum_rows(own, group).chunk(2);
  return {halves[0], halves[1]};
}

/// running = (1 - momentum) * running + momentum * new, with the unbiased variance.
void update_running_statistics(const BatchNormArguments& arguments, const MergedMoments& merged) {
  const auto blend = [&](const at::Tensor& running, const at::Tensor& value) {
    if (running.defined()) running.lerp_(value.to(running.scalar_type()), arguments.momentum);
  };
  blend(arguments.running_mean, merged.mean);
  if (arguments.running_var.defined()) {
    blend(arguments.running_var, merged.m2 / (merged.count - 1));
  }
}

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  // Weight and bias are named again for autograd: it looks for them among the arguments.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/,
                            const std::optional<at::Tensor>& /*bias*/,
                            const BatchNormArguments& arguments, const ProcessGroupPtr& group) {
    const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
    const int64_t channels = input.size(1);
    const int64_t count = channels == 0 ? 0 : input.numel() / channels;

    const MergedMoments merged = kernels.merge(exchange(kernels.moments(input), count, group));
    // Two values or more here are two or more everywhere; only fewer need a look at the sum, which
    // on a GPU waits for it.
    const double total = count > 1 ? 2.0 : merged.count.item<double>();
    if (total == 1) {
      throw base::UserError(fmt::format(
          "SyncBatchNorm: the {} ranks together have one value per channel (input {} here), whose "
          "variance is not defined; train with a larger batch",
          group->getSize(), c10::str(input.sizes())));
    }
    if (total > 1) update_running_statistics(arguments, merged);

    // No values at all must not become 0 / 0, which would reach the gradients of the parameters.
    const at::Tensor variance = merged.m2 / merged.count.clamp_min(1.0);
    const at::Tensor invstd = (variance + arguments.eps).rsqrt_();
    context->save_for_backward({input, arguments.weight, merged.mean, invstd, merged.count});
    context->saved_data["group"] = group;
    context->saved_data["has_bias"] = arguments.bias.defined();
    return kernels.transform(input, arguments.weight, arguments.bias, merged.mean, invstd);
  }

  static variable_list backward(AutogradContext* context, variable_list grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw base::UserError(
          "SyncBatchNorm: a gradient of its gradient (create_graph=true) is not supported");
    }
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3],
                     &count = saved[4];
    const auto group = context->saved_data["group"].toCustomClass<c10d::ProcessGroup>();
    const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
    const at::Tensor& grad_output = grad_outputs[0];

    const BackwardSums sums = kernels.backward_reduce(grad_output, input, mean, invstd);
    at::Tensor grad_weight;
    at::Tensor grad_bias;
    // Autograd counts the tensors that were given: input, weight if any, bias if any.
    size_t index = 1;
    const bool has_bias = context->saved_data["has_bias"].toBool();
    if (weight.defined() && context->needs_input_grad(index++)) {
      grad_weight = sums.dy_xmu * invstd;
    }
    if (has_bias && context->needs_input_grad(index)) grad_bias = sums.dy;
    at::Tensor grad_input;
    // Whether the input needs a gradient follows from the network, so all ranks agree.
    if (context->needs_input_grad(0)) {
      grad_input = kernels.backward_elementwise(grad_output, input, weight, mean, invstd,
                                                exchange(sums, group), count);
    }
    return {grad_input, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor sync_batch_norm(const BatchNormArguments& arguments, const ProcessGroupPtr& group) {
  check_input(arguments);
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return SyncBatchNormFunction::apply(arguments.input, optional(arguments.weight),
                                      optional(arguments.bias), arguments, group);
}

}  // namespace syncbn::dist::detail

#include "batch_norm/batch_norm_function.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <vector>

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include "batch_norm/batch_norm_kernels.h"
#include "batch_norm/statistics_scopes.h"

namespace syncbn::dist::detail {

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
      throw base::UserError(fmt::format("SyncBatchNorm: the layer has {}, the input {} has {}",
                                        base::counted(tensor->numel(), "channel"),
                                        c10::str(input.sizes()), input.size(1)));
    }
    if (tensor->device() != input.device()) {
      throw base::UserError(fmt::format("SyncBatchNorm: the layer is on {}, its input on {}",
                                        tensor->device().str(), input.device().str()));
    }
  }
  if (arguments.residual.defined() && arguments.residual.sizes() != input.sizes()) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: the residual must have the sizes of the input {}, it has {}",
                    c10::str(input.sizes()), c10::str(arguments.residual.sizes())));
  }
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Epilogue epilogue_of(const BatchNormArguments& arguments) {
  const at::Tensor& residual = arguments.residual;
  return {.residual = residual.defined() ? residual.detach() : residual, .relu = arguments.relu};
}

/// Statistics over all ranks; also updates the running statistics.
/// @param output set if a fused kernel has normalised as well.
MergedMoments statistics(const BatchNormArguments& arguments, const Exchange& exchange,
                         bool& updated, Output& output) {
  const at::Tensor& input = arguments.input;
  const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
  const int64_t channels = input.size(1);
  const int64_t count = channels == 0 ? 0 : input.numel() / channels;
  MergedMoments merged =
      exchange.ranks() == 1 && kernels.fused_local_forward != nullptr
          ? kernels.fused_local_forward(input, arguments.weight, arguments.bias, arguments.eps,
                                        epilogue_of(arguments), output)
          : kernels.merge(exchange.gather(kernels.moments(input)), channels);
  // Reading the total waits for the GPU: only necessary with fewer than two values on this rank.
  const double total = count > 1 ? 2.0 : merged.count.item<double>();
  if (total == 1) {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: one value per channel over {} (input {} here) has no variance to train "
        "with; use a larger batch",
        exchange.ranks() == 1 ? "one rank" : fmt::format("all {} ranks", exchange.ranks()),
        c10::str(input.sizes())));
  }
  if (BatchStatisticsRecorder* const recorder = BatchStatisticsRecorder::current) {
    const at::Tensor& layer = arguments.running_mean;
    if (layer.defined()) recorder->batches[layer.unsafeGetTensorImpl()].push_back(merged);
    return merged;
  }
  updated = total > 1;
  if (updated) {
    kernels.update_running({arguments.running_mean, arguments.running_var,
                            arguments.num_batches_tracked, arguments.momentum},
                           merged);
  }
  return merged;
}

/// exchange.sum() with a gradient: every rank's value contributes to the sum on all ranks.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own,
                            const c10::intrusive_ptr<Exchange>& exchange) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    return exchange->sum(own);
  }
  static variable_list backward(AutogradContext* context, variable_list grad_outputs) {
    const auto exchange =
        c10::static_intrusive_pointer_cast<Exchange>(context->saved_data["exchange"].toCapsule());
    return {SumOverRanks::apply(grad_outputs[0].contiguous(), exchange), at::Tensor()};
  }
};

struct Gradients {
  at::Tensor input, weight, bias;
};

/// The gradients as differentiable operations, for gradients of gradients. Deviations are taken
/// from the saved mean, a constant: `shift`, the mean deviation (zero except for rounding), carries
/// the gradient of the mean, so that one exchange suffices.
Gradients differentiable_gradients(const at::Tensor& grad_output, const at::Tensor& input,
                                   const at::Tensor& weight, const MergedMoments& saved, double eps,
                                   const c10::intrusive_ptr<Exchange>& exchange) {
  const at::ScalarType type = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<int64_t> per_channel(static_cast<size_t>(input.dim()), 1);
  per_channel[1] = input.size(1);
  std::vector<int64_t> summed{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) summed.push_back(dim);
  const auto spread = [&](const at::Tensor& values) { return values.to(type).view(per_channel); };
  const auto sum = [&](const at::Tensor& values) {
    return values.sum(summed, /*keepdim=*/false, at::kDouble);
  };
  const at::Tensor dy = grad_output.to(type);
  const at::Tensor deviation = input.to(type) - spread(saved.mean);
  const at::Tensor own_dy = sum(dy);
  const at::Tensor own_dy_x = sum(dy * deviation);
  const at::Tensor own = at::cat({sum(deviation), sum(deviation * deviation), own_dy, own_dy_x});
  const auto means = (SumOverRanks::apply(own, exchange) / saved.count.clamp_min(1.0)).chunk(4);
  const at::Tensor& shift = means[0];
  const at::Tensor invstd = (means[1] - shift * shift + eps).rsqrt();
  const at::Tensor mean_dy_xmu = means[3] - shift * means[2];
  const at::Tensor scale = weight.defined() ? invstd * weight.to(at::kDouble) : invstd;
  Gradients result;
  result.input = (dy - spread(means[2]) -
                  (deviation - spread(shift)) * spread(invstd * invstd * mean_dy_xmu)) *
                 spread(scale);
  result.weight = (own_dy_x - shift * own_dy) * invstd;
  result.bias = own_dy;
  return result;
}

/// What backward needs besides tensors.
struct Saved : torch::CustomClassHolder {
  c10::intrusive_ptr<Exchange> exchange;
  double eps = 0;
  bool has_bias = false;
  bool has_residual = false;
};

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  // Autograd finds the differentiable tensors among the arguments of this function only.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/,
                            const std::optional<at::Tensor>& /*bias*/,
                            const std::optional<at::Tensor>& /*residual*/,
                            const BatchNormArguments& arguments,
                            const c10::intrusive_ptr<Exchange>& exchange, bool* updated) {
    Output output;
    const MergedMoments merged =
        TapeScope::next([&] { return statistics(arguments, *exchange, *updated, output); });
    const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
    const at::Tensor invstd = kernels.inverse_deviation(merged, arguments.eps);
    if (!output.values.defined()) {
      output = kernels.transform(input, arguments.weight, arguments.bias, merged.mean, invstd,
                                 epilogue_of(arguments));
    }
    context->save_for_backward(
        {input, arguments.weight, merged.mean, merged.m2, merged.count, invstd, output.relu_mask});
    auto more = c10::make_intrusive<Saved>();
    more->exchange = exchange;
    more->eps = arguments.eps;
    more->has_bias = arguments.bias.defined();
    more->has_residual = arguments.residual.defined();
    context->saved_data["more"] = c10::IValue::make_capsule(std::move(more));
    return output.values;
  }

  static variable_list backward(AutogradContext* context, variable_list grad_outputs) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &invstd = saved[5];
    const MergedMoments merged{saved[2], saved[3], saved[4]};
    const auto more =
        c10::static_intrusive_pointer_cast<Saved>(context->saved_data["more"].toCapsule());
    const c10::intrusive_ptr<Exchange>& exchange = more->exchange;
    OutputGradient gradient{grad_outputs[0], saved[6]};
    const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
    const auto apply_relu_mask = [&] {
      if (!gradient.relu_mask.defined()) return;
      gradient = {kernels.apply_relu_mask(gradient, input), at::Tensor()};
    };

    // Autograd numbers only the tensors that were given.
    size_t index = 1;
    const auto is_needed = [&](bool given) { return given && context->needs_input_grad(index++); };
    const bool needs_input = context->needs_input_grad(0);
    const bool needs_weight = is_needed(weight.defined());
    const bool needs_bias = is_needed(more->has_bias);
    const bool needs_residual = is_needed(more->has_residual);

    Gradients gradients;
    if (at::GradMode::is_enabled()) {
      apply_relu_mask();
      gradients =
          differentiable_gradients(gradient.values, input, weight, merged, more->eps, exchange);
    } else {
      at::Tensor sums;
      // All ranks agree on needs_input, which follows from the network.
      if (needs_input && exchange->ranks() == 1 && kernels.fused_local_backward != nullptr) {
        sums = kernels.fused_local_backward(gradient, input, weight, merged.mean, invstd,
                                            merged.count, needs_residual, gradients.input);
      } else {
        sums = kernels.backward_reduce(gradient, input, merged.mean, invstd);
        if (needs_input) {
          gradients.input =
              kernels.backward_elementwise(gradient, input, weight, merged.mean, invstd,
                                           exchange->sum(sums), merged.count, needs_residual);
        }
      }
      if (needs_residual) apply_relu_mask();
      if (needs_weight || needs_bias) {
        const at::Tensor& any = weight.defined() ? weight : input;
        const ParameterGradients parameters =
            kernels.parameter_gradients(sums, invstd, any.scalar_type());
        gradients.weight = parameters.weight;
        gradients.bias = parameters.bias;
      }
    }
    const auto if_needed = [](bool needed, const at::Tensor& gradient) {
      return needed ? gradient : at::Tensor();
    };
    return {if_needed(needs_input, gradients.input),
            if_needed(needs_weight, gradients.weight),
            if_needed(needs_bias, gradients.bias),
            if_needed(needs_residual, gradient.values),
            {},
            {},
            {}};
  }
};

}  // namespace

BatchNormResult sync_batch_norm(const BatchNormArguments& arguments, const LayerName& layer,
                                const ProcessGroupPtr& group, Timeout timeout) {
  check_input(arguments);
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const at::Tensor& input = arguments.input;
  const auto exchange =
      c10::make_intrusive<Exchange>(layer, input.size(1), input.scalar_type(), group, timeout);
  BatchNormResult result;
  result.output = SyncBatchNormFunction::apply(
      input, optional(arguments.weight), optional(arguments.bias), optional(arguments.residual),
      arguments, exchange, &result.updated);
  return result;
}

}  // namespace syncbn::dist::detail

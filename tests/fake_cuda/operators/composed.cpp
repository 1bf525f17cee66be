// The operators of batch norm that only CUDA has, in float64, and dropout.
#include "composed.h"

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

namespace fake_cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool is_given(const MaybeTensor& tensor) {
  return tensor && tensor->defined();
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

Tensor wide(const Tensor& tensor) {
  return tensor.to(at::kDouble);
}

at::ScalarType statistics_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// One value per channel, in a shape that broadcasts over `input`, in float64.
Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return wide(values).view(shape);
}

Tensor like_input(const Tensor& values, const Tensor& input) {
  return values.to(input.scalar_type()).contiguous(input.suggest_memory_format());
}

void blend(const MaybeTensor& running, const Tensor& value, double momentum) {
  if (is_given(running)) running->mul_(1 - momentum).add_(value, momentum);
}

/// Biased variance and mean.
std::tuple<Tensor, Tensor> moments(const Tensor& input) {
  return at::var_mean(wide(input), all_but_channels(input), /*correction=*/0.0, /*keepdim=*/false);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const auto [variance, mean] = moments(input);
  const auto type = statistics_type(input);
  return {mean.to(type), variance.add(eps).rsqrt().to(type)};
}

std::tuple<Tensor, Tensor> batch_norm_update_stats(const Tensor& input,
                                                   const MaybeTensor& running_mean,
                                                   const MaybeTensor& running_var,
                                                   double momentum) {
  const auto [variance, mean] = moments(input);
  const auto count = static_cast<double>(input.numel() / input.size(1));
  blend(running_mean, mean, momentum);
  blend(running_var, variance * (count / (count - 1)), momentum);
  const auto type = statistics_type(input);
  return {mean.to(type), variance.to(type)};
}

Tensor batch_norm_elemt(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                        const Tensor& mean, const Tensor& invstd, double /*eps*/) {
  Tensor output = (wide(input) - per_channel(mean, input)) * per_channel(invstd, input);
  if (is_given(weight)) output = output * per_channel(*weight, input);
  if (is_given(bias)) output = output + per_channel(*bias, input);
  return like_input(output, input);
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& means, const Tensor& invstds,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps,
    const Tensor& counts) {
  const Tensor count = wide(counts).view({-1, 1});
  const Tensor total = count.sum();
  const Tensor mean = (wide(means) * count).sum(0) / total;
  const Tensor variances = wide(invstds).pow(-2) - eps;
  const Tensor m2 = (count * (variances + (wide(means) - mean).pow(2))).sum(0);
  blend(running_mean, mean, momentum);
  blend(running_var, m2 / (total - 1), momentum);
  const auto type = statistics_type(input);
  return {mean.to(type), m2.div(total).add(eps).rsqrt().to(type)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const MaybeTensor& weight, bool /*input_g*/, bool /*weight_g*/, bool /*bias_g*/) {
  const auto dims = all_but_channels(input);
  const Tensor sum_dy = wide(grad_output).sum(dims);
  const Tensor sum_dy_xmu =
      (wide(grad_output) * (wide(input) - per_channel(mean, input))).sum(dims);
  const auto type = statistics_type(input);
  const auto of_parameters = is_given(weight) ? weight->scalar_type() : type;
  return {sum_dy.to(type), sum_dy_xmu.to(type), (sum_dy_xmu * wide(invstd)).to(of_parameters),
          sum_dy.to(of_parameters)};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const MaybeTensor& weight,
                                 const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                                 const Tensor& counts) {
  const Tensor total = wide(counts).sum();
  const Tensor scale = is_given(weight) ? wide(*weight) * wide(invstd) : wide(invstd);
  const Tensor slope = wide(invstd).pow(2) * wide(sum_dy_xmu) / total;
  const Tensor gradient = wide(grad_output) - per_channel(wide(sum_dy) / total, input) -
                          (wide(input) - per_channel(mean, input)) * per_channel(slope, input);
  return like_input(gradient * per_channel(scale, input), input);
}

// The CPU's dropout kernel only uses the host's default generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (train && !*train) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace

std::set<std::string> register_composed(torch::Library& library) {
  std::set<std::string> names;
  const auto add = [&](const char* name, auto* function) {
    library.impl(name, function);
    names.insert(name);
  };
  add("batch_norm_stats", batch_norm_stats);
  add("batch_norm_update_stats", batch_norm_update_stats);
  add("batch_norm_elemt", batch_norm_elemt);
  add("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts);
  add("batch_norm_backward_reduce", batch_norm_backward_reduce);
  add("batch_norm_backward_elemt", batch_norm_backward_elemt);
  add("native_dropout", native_dropout);
  return names;
}

}  // namespace fake_cuda

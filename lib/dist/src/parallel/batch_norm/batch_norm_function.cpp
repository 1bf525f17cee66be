#include "batch_norm/batch_norm_function.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <array>
#include <span>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "batch_norm/batch_norm_kernels.h"
#include "batch_norm/replica_scope.h"
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
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

Epilogue epilogue_of(const BatchNormArguments& arguments) {
  const at::Tensor& residual = arguments.residual;
  return {.residual = residual.defined() ? residual.detach() : residual, .relu = arguments.relu};
}

class SyncBatchNormNode;

/// What a replica of the layer brings to its forward. Without DataParallel there is one.
struct Part {
  const BatchNormArguments& arguments;
  const LayerName& layer;
  const GetGroup& group;
  BatchStatisticsRecorder* recorder = BatchStatisticsRecorder::current;
  /// The node has the first part's, whichever thread makes it: autograd takes the highest number
  /// that is ready, and ranks must run the layers' backwards in the same order.
  const uint64_t sequence_number = at::sequence_number::get_and_increment();
  at::Tensor moments = {};  ///< of its batch; undefined if it is the only part
  // Made for all parts together:
  at::Tensor mean = {}, invstd = {};
  std::shared_ptr<SyncBatchNormNode> node = {};  ///< null: no gradients are needed
  bool updated = false;
};

/// The moments of all parts, on the first one's device. Each of several parts has its own already.
at::Tensor local_moments(std::span<Part* const> parts) {
  const at::Tensor& input = parts.front()->arguments.input;
  const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
  if (parts.size() == 1) return kernels.moments(input);
  std::vector<at::Tensor> rows;
  for (const Part* part : parts) rows.push_back(part->moments.to(input.device()));
  return as_row(kernels.merge(at::stack(rows), input.size(1)));
}

int64_t values_per_channel(const at::Tensor& input) {
  return input.size(1) == 0 ? 0 : input.numel() / input.size(1);
}

/// Statistics over all parts of all ranks; also updates the running statistics.
/// @param output set if a fused kernel has normalised as well.
MergedMoments statistics(std::span<Part* const> parts, const Exchange& exchange, Output& output) {
  const BatchNormArguments& arguments = parts.front()->arguments;
  const at::Tensor& input = arguments.input;
  const BatchNormKernels& kernels = batch_norm_kernels(input.device().type());
  int64_t count = 0;
  for (const Part* part : parts) count += values_per_channel(part->arguments.input);
  const bool is_alone = parts.size() == 1 && exchange.ranks() == 1;
  MergedMoments merged =
      is_alone && kernels.fused_local_forward != nullptr
          ? kernels.fused_local_forward(input, arguments.weight, arguments.bias, arguments.eps,
                                        epilogue_of(arguments), output)
          : kernels.merge(exchange.moments(local_moments(parts)), input.size(1));
  // Reading the total waits for the GPU: only necessary with fewer than two values on this rank.
  const double total = count > 1 ? 2.0 : merged.count.item<double>();
  if (total == 1) {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: one value per channel over {} (input {} here) has no variance to train "
        "with; use a larger batch",
        exchange.ranks() == 1 ? "one rank" : fmt::format("all {} ranks", exchange.ranks()),
        c10::str(input.sizes())));
  }
  if (BatchStatisticsRecorder* const recorder = parts.front()->recorder) {
    const at::Tensor& layer = arguments.running_mean;
    if (layer.defined()) recorder->batches[layer.unsafeGetTensorImpl()].push_back(merged);
    return merged;
  }
  if (total > 1) {
    for (Part* part : parts) part->updated = true;
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

/// Normalises what several replicas of a layer have, with gradients of any order. Its inputs are
/// the gradients of their outputs; its outputs those of each replica's input, of weight, bias, and
/// of each replica's residual.
class SyncBatchNormNode : public torch::autograd::Node {
 public:
  SyncBatchNormNode(std::span<Part* const> parts, const MergedMoments& merged,
                    c10::intrusive_ptr<Exchange> exchange)
      : Node(parts.front()->sequence_number),
        exchange_(std::move(exchange)),
        merged_(merged),
        eps_(parts.front()->arguments.eps) {
    const BatchNormArguments& shared = parts.front()->arguments;
    weight_ = SavedVariable(shared.weight, /*is_output=*/false);
    type_ = (shared.weight.defined() ? shared.weight : shared.input).scalar_type();
    for (const Part* part : parts) {
      inputs_.emplace_back(part->arguments.input, /*is_output=*/false);
      invstds_.push_back(part->invstd);
      means_.push_back(part->mean);
      add_input_metadata(part->arguments.input);  // the output is like it
    }
    relu_masks_.resize(parts.size());
    for (const Part* part : parts) add_edge(part->arguments.input);
    add_edge(shared.weight);
    add_edge(shared.bias);
    for (const Part* part : parts) add_edge(part->arguments.residual);
  }

  /// Whether a gradient leads to one of the parts.
  static bool is_needed(std::span<Part* const> parts) {
    if (!at::GradMode::is_enabled()) return false;
    for (const Part* part : parts) {
      const BatchNormArguments& arguments = part->arguments;
      for (const at::Tensor* tensor :
           {&arguments.input, &arguments.weight, &arguments.bias, &arguments.residual}) {
        if (tensor->defined() && tensor->requires_grad()) return true;
      }
    }
    return false;
  }

  /// Makes the output one of this node's. Each replica calls it on its own thread.
  void set_output(size_t replica, Output& output) {
    torch::autograd::impl::set_gradient_edge(output.values,
                                             {getptr(), static_cast<uint32_t>(replica)});
    if (!output.relu_mask.defined()) return;
    relu_masks_[replica] = SavedVariable(output.relu_mask, output.relu_mask.is_same(output.values));
  }

  std::string name() const override { return "SyncBatchNorm"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    weight_.reset_data();
    for (SavedVariable& input : inputs_) input.reset_data();
    for (SavedVariable& mask : relu_masks_) mask.reset_data();
  }

  variable_list apply(variable_list&& grad_outputs) override {
    const std::lock_guard lock(mutex_);
    const size_t replicas = inputs_.size();
    const size_t weight_edge = replicas;
    const auto needs = [&](size_t edge) { return task_should_compute_output(edge); };
    const auto needs_residual = [&](size_t replica) { return needs(replicas + 2 + replica); };
    const at::Tensor weight = weight_.unpack();
    std::vector<at::Tensor> inputs;
    std::vector<OutputGradient> gradients;
    bool needs_input = false;
    for (size_t i = 0; i < replicas; ++i) {
      inputs.push_back(inputs_[i].unpack());
      const at::Tensor& given = grad_outputs[i];
      gradients.push_back(
          {given.defined() ? given : at::zeros_like(inputs[i]), relu_masks_[i].unpack(getptr())});
      needs_input = needs_input || needs(i);
    }
    const auto apply_relu_mask = [&](size_t i) {
      if (!gradients[i].relu_mask.defined()) return;
      gradients[i] = {kernels(i).apply_relu_mask(gradients[i], inputs[i]), at::Tensor()};
    };
    variable_list results(num_outputs());
    if (at::GradMode::is_enabled()) {
      for (size_t i = 0; i < replicas; ++i) apply_relu_mask(i);
      differentiate(inputs, gradients, weight, results);
    } else {
      const at::Tensor sums =
          reduce(inputs, gradients, weight, needs_input, needs_residual, results);
      for (size_t i = 0; i < replicas; ++i) {
        if (needs_residual(i)) apply_relu_mask(i);
      }
      if (needs(weight_edge) || needs(weight_edge + 1)) {
        const ParameterGradients parameters =
            kernels(0).parameter_gradients(sums, invstds_[0], type_);
        results[weight_edge] = parameters.weight;
        results[weight_edge + 1] = parameters.bias;
      }
    }
    for (size_t i = 0; i < replicas; ++i) results[replicas + 2 + i] = gradients[i].values;
    for (size_t edge = 0; edge < results.size(); ++edge) {
      if (!needs(edge)) results[edge] = at::Tensor();
    }
    return results;
  }

 private:
  void add_edge(const at::Tensor& tensor) {
    add_next_edge(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor)
                                   : torch::autograd::Edge());
  }

  const BatchNormKernels& kernels(size_t replica) const {
    return batch_norm_kernels(means_[replica].device().type());
  }

  /// The gradients of the inputs. @return this process's sums over all replicas, [2C].
  template <class NeedsResidual>
  at::Tensor reduce(const std::vector<at::Tensor>& inputs, std::vector<OutputGradient>& gradients,
                    const at::Tensor& weight, bool needs_input, const NeedsResidual& needs_residual,
                    variable_list& results) const {
    // All ranks agree on needs_input, which follows from the network.
    if (needs_input && inputs.size() == 1 && exchange_->ranks() == 1 &&
        kernels(0).fused_local_backward != nullptr) {
      return kernels(0).fused_local_backward(gradients[0], inputs[0], weight, means_[0],
                                             invstds_[0], merged_.count, needs_residual(0),
                                             results[0]);
    }
    at::Tensor sums;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor own =
          kernels(i).backward_reduce(gradients[i], inputs[i], means_[i], invstds_[i]);
      sums = i == 0 ? own : sums + own.to(sums.device());
    }
    if (!needs_input) return sums;
    const at::Tensor total = exchange_->sum(sums);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto here = [&](const at::Tensor& shared) {
        return shared.defined() ? shared.to(inputs[i].device()) : shared;
      };
      results[i] = kernels(i).backward_elementwise(gradients[i], inputs[i], here(weight), means_[i],
                                                   invstds_[i], here(total), here(merged_.count),
                                                   needs_residual(i));
    }
    return sums;
  }

  /// The gradients with a graph, for the concatenation of all replicas' values.
  void differentiate(const std::vector<at::Tensor>& inputs,
                     const std::vector<OutputGradient>& gradients, const at::Tensor& weight,
                     variable_list& results) const {
    const at::Device device = inputs.front().device();
    std::vector<at::Tensor> all_inputs;
    std::vector<at::Tensor> all_gradients;
    std::vector<int64_t> rows;
    for (size_t i = 0; i < inputs.size(); ++i) {
      all_inputs.push_back(inputs[i].to(device));
      all_gradients.push_back(gradients[i].values.to(device));
      rows.push_back(inputs[i].size(0));
    }
    const auto joined = [](const std::vector<at::Tensor>& tensors) {
      return tensors.size() == 1 ? tensors.front() : at::cat(tensors);
    };
    const Gradients whole = differentiable_gradients(joined(all_gradients), joined(all_inputs),
                                                     weight, merged_, eps_, exchange_);
    const auto parts = whole.input.split_with_sizes(rows);
    for (size_t i = 0; i < inputs.size(); ++i) results[i] = parts[i].to(inputs[i].device());
    results[inputs.size()] = whole.weight;
    results[inputs.size() + 1] = whole.bias;
  }

  c10::intrusive_ptr<Exchange> exchange_;
  MergedMoments merged_;
  double eps_;
  at::ScalarType type_ = at::kFloat;  ///< of the gradients of weight and bias
  SavedVariable weight_;
  // One for each replica:
  std::vector<SavedVariable> inputs_, relu_masks_;
  std::vector<at::Tensor> means_, invstds_;
};

/// What the parts of a layer do together: statistics, and the node of the graph.
/// @param output set if a fused kernel has normalised the only part as well.
void combine(std::span<Part* const> parts, Timeout timeout, Output& output) {
  Part& first = *parts.front();
  const at::Tensor& input = first.arguments.input;
  const bool needs_gradients = SyncBatchNormNode::is_needed(parts);
  const at::NoGradGuard no_grad;
  const auto exchange =
      c10::make_intrusive<Exchange>(first.layer, input.size(1), input.scalar_type(),
                                    first.group ? first.group() : nullptr, timeout);
  const MergedMoments merged =
      TapeScope::next([&] { return statistics(parts, *exchange, output); });
  const at::Tensor invstd =
      batch_norm_kernels(input.device().type()).inverse_deviation(merged, first.arguments.eps);
  for (Part* part : parts) {
    part->mean = merged.mean.to(part->arguments.input.device());
    part->invstd = invstd.to(part->arguments.input.device());
  }
  if (!needs_gradients) return;
  const std::shared_ptr<SyncBatchNormNode> node(new SyncBatchNormNode(parts, merged, exchange),
                                                torch::autograd::deleteNode);
  for (Part* part : parts) part->node = node;
}

/// combine() with the parts of the module's other replicas.
void combine_with_replicas(const ReplicaScope& scope, Part& part, Timeout timeout) {
  if (TapeScope::is_open()) {
    throw base::UserError(
        "SyncBatchNorm: checkpoint() inside DataParallel would recompute a layer of one replica "
        "without the others; use it with DistributedDataParallel");
  }
  const BatchNormArguments& arguments = part.arguments;
  const at::Tensor& key =
      arguments.running_mean.defined() ? arguments.running_mean : arguments.weight;
  static const char no_tensors = 0;
  const void* const layer =
      key.defined() ? static_cast<const void*>(ReplicaScope::original_of(key.unsafeGetTensorImpl()))
                    : &no_tensors;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor& input = arguments.input;
    part.moments = batch_norm_kernels(input.device().type()).moments(input);
  }
  const std::string name = part.layer.given.empty() ? "a layer without a name"
                                                    : fmt::format("layer '{}'", part.layer.given);
  scope.team().meet(scope.replica(), {layer, name, &part}, [&](std::span<void* const> all) {
    std::vector<Part*> parts;
    for (void* const one : all) parts.push_back(static_cast<Part*>(one));
    Output unused;
    combine(parts, timeout, unused);
  });
}

}  // namespace

BatchNormResult sync_batch_norm(const BatchNormArguments& arguments, const LayerName& layer,
                                const GetGroup& group, Timeout timeout) {
  check_input(arguments);
  if (arguments.input._fw_grad(/*level=*/0).defined()) {
    throw base::UserError("SyncBatchNorm: it has no forward-mode derivative; use backward()");
  }
  Part part{.arguments = arguments, .layer = layer, .group = group};
  Output output;
  const ReplicaScope* const scope = group ? ReplicaScope::current() : nullptr;
  if (scope != nullptr) {
    combine_with_replicas(*scope, part, timeout);
  } else {
    combine(std::array{&part}, timeout, output);
  }
  if (!output.values.defined()) {
    const at::NoGradGuard no_grad;
    output = batch_norm_kernels(arguments.input.device().type())
                 .transform(arguments.input, arguments.weight, arguments.bias, part.mean,
                            part.invstd, epilogue_of(arguments));
  }
  if (part.node) {
    part.node->set_output(scope != nullptr ? static_cast<size_t>(scope->replica()) : 0, output);
  }
  return {.output = output.values, .updated = part.updated};
}

}  // namespace syncbn::dist::detail

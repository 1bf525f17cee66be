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
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "autograd_node.h"
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
  if (arguments.residual.defined() && arguments.residual.device() != input.device()) {
    throw base::UserError(fmt::format("SyncBatchNorm: the residual is on {}, the input on {}",
                                      arguments.residual.device().str(), input.device().str()));
  }
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// @param updates whether the forward updates the running statistics
ForwardOptions options_of(const BatchNormArguments& arguments, bool updates) {
  const at::Tensor& residual = arguments.residual;
  ForwardOptions options{.weight = arguments.weight,
                         .bias = arguments.bias,
                         .eps = arguments.eps,
                         .epilogue = {.residual = residual.defined() ? residual.detach() : residual,
                                      .relu = arguments.relu}};
  if (updates) {
    options.running = {arguments.running_mean, arguments.running_var, arguments.num_batches_tracked,
                       arguments.momentum};
  }
  return options;
}

class SyncBatchNormNode;

/// One replica's part in a forward of the layer. Without DataParallel there is one part.
struct Part {
  const BatchNormArguments& arguments;
  const LayerName& layer;
  const GetGroup& group;
  BatchStatisticsRecorder* recorder = BatchStatisticsRecorder::current;
  /// The node gets the first part's number, whichever thread creates it: autograd runs the ready
  /// node with the highest number, and ranks must run the layers' backwards in the same order.
  const uint64_t sequence_number = at::sequence_number::get_and_increment();
  /// First of this replica's batch, then of all replicas and ranks. Undefined without DataParallel.
  at::Tensor moments = {};
  NodePointer<SyncBatchNormNode> node = {};  ///< null: no gradients are needed
  bool updated = false;

  const at::Tensor& input() const { return arguments.input; }
  const BatchNormKernels& kernels() const { return batch_norm_kernels(input().device().type()); }
};

/// Moments as on CPUs, on any device.
at::Tensor with_squared_deviations(const at::Tensor& moments, int64_t channels, double eps) {
  if (moments.is_cpu()) return moments;
  const at::Tensor wide = moments.to(at::kDouble);
  const at::Tensor count = total_count(wide, channels);
  const at::Tensor variance = (wide.narrow(0, channels, channels).pow(-2) - eps).clamp_min(0);
  return at::cat({wide.narrow(0, 0, channels), variance * count, count.view(1)});
}

int64_t values_per_channel(const at::Tensor& input) {
  return input.size(1) == 0 ? 0 : input.numel() / input.size(1);
}

/// Records the layer's statistics, or decides for all parts whether they update the running ones.
/// @throws base::UserError for one value per channel
void use_moments(std::span<Part* const> parts, const Exchange& exchange,
                 const at::Tensor& moments) {
  const Part& first = *parts.front();
  int64_t count = 0;
  for (const Part* part : parts) count += values_per_channel(part->input());
  // Read the total, which waits for the GPU, only if this rank has fewer than two values.
  const double total = count > 1 ? 2.0 : total_count(moments, first.input().size(1)).item<double>();
  if (total == 1) {
    throw base::UserError(fmt::format(
        "SyncBatchNorm: one value per channel over {} (input {} here) has no variance to train "
        "with; use a larger batch",
        exchange.ranks() == 1 ? "one rank" : fmt::format("all {} ranks", exchange.ranks()),
        c10::str(first.input().sizes())));
  }
  if (first.recorder != nullptr) {
    const at::Tensor& layer = first.arguments.running_mean;
    if (layer.defined()) {
      first.recorder->batches[layer.unsafeGetTensorImpl()].push_back(
          with_squared_deviations(moments, first.input().size(1), first.arguments.eps));
    }
    return;
  }
  for (Part* part : parts) part->updated = total > 1;
}

/// The sum over ranks with a gradient: every rank's value contributes to the sum on all ranks.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own,
                            const c10::intrusive_ptr<Exchange>& exchange) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    return exchange->sums(own.clone());
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
                                   const at::Tensor& weight, const at::Tensor& moments, double eps,
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
  const at::Tensor deviation = input.to(type) - spread(moments.narrow(0, 0, input.size(1)));
  const at::Tensor own_dy = sum(dy);
  const at::Tensor own_dy_x = sum(dy * deviation);
  const at::Tensor own = at::cat({sum(deviation), sum(deviation * deviation), own_dy, own_dy_x});
  const at::Tensor count = total_count(moments, input.size(1)).clamp_min(1.0);
  const auto means = (SumOverRanks::apply(own, exchange) / count).chunk(4);
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

/// The backward of a layer's forward in all its replicas, with gradients of any order. Inputs: the
/// gradient of each replica's output. Outputs: the gradients of each replica's input, of weight, of
/// bias, and of each replica's residual.
class SyncBatchNormNode : public torch::autograd::Node {
 public:
  SyncBatchNormNode(std::span<Part* const> parts, c10::intrusive_ptr<Exchange> exchange)
      : Node(parts.front()->sequence_number),
        exchange_(std::move(exchange)),
        eps_(parts.front()->arguments.eps) {
    const BatchNormArguments& shared = parts.front()->arguments;
    weight_ = SavedVariable(shared.weight, /*is_output=*/false);
    type_ = (shared.weight.defined() ? shared.weight : shared.input).scalar_type();
    for (const Part* part : parts) {
      inputs_.emplace_back(part->arguments.input, /*is_output=*/false);
      add_input_metadata(part->arguments.input);  // the output is like it
    }
    relu_masks_.resize(parts.size());
    moments_.resize(parts.size());
    invstds_.resize(parts.size());
    for (const Part* part : parts) add_edge(part->arguments.input);
    add_edge(shared.weight);
    add_edge(shared.bias);
    for (const Part* part : parts) add_edge(part->arguments.residual);
  }

  /// Whether a tensor of any part requires a gradient.
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

  /// Makes this node the grad_fn of a replica's output. Each replica calls it on its own thread.
  void set_output(size_t replica, Normalized& result) {
    moments_[replica] = result.moments;
    invstds_[replica] = result.invstd;
    relu_masks_[replica] = SavedVariable(result.output.relu_mask, /*is_output=*/false);
    torch::autograd::impl::set_gradient_edge(result.output.values,
                                             {getptr(), static_cast<uint32_t>(replica)});
  }

  std::string name() const override { return "SyncBatchNorm"; }

  // The mutex is autograd's. It guards the saved variables, as in libtorch's nodes; no tensor is
  // freed and no collective runs under it.

  void release_variables() override {
    std::vector<SavedVariable> released;
    const std::lock_guard lock(mutex_);
    released.push_back(std::move(weight_));
    for (auto* variables : {&inputs_, &relu_masks_}) {
      for (SavedVariable& variable : *variables) released.push_back(std::move(variable));
    }
  }

  variable_list apply(variable_list&& grad_outputs) override {
    const size_t replicas = inputs_.size();
    const size_t weight_edge = replicas;
    const auto needs = [&](size_t edge) { return task_should_compute_output(edge); };
    const auto needs_residual = [&](size_t replica) { return needs(replicas + 2 + replica); };
    at::Tensor weight;
    std::vector<at::Tensor> inputs;
    std::vector<OutputGradient> gradients;
    {
      const std::lock_guard lock(mutex_);
      weight = weight_.unpack();
      for (size_t i = 0; i < replicas; ++i) {
        inputs.push_back(inputs_[i].unpack());
        gradients.push_back({grad_outputs[i], relu_masks_[i].unpack()});
      }
    }
    bool needs_input = false;
    for (size_t i = 0; i < replicas; ++i) {
      if (!gradients[i].values.defined()) gradients[i].values = at::zeros_like(inputs[i]);
      needs_input = needs_input || needs(i);
    }
    const auto apply_mask = [&](size_t i) {
      if (!gradients[i].relu_mask.defined()) return;
      gradients[i] = {apply_relu_mask(gradients[i], inputs[i]), at::Tensor()};
    };
    variable_list results(num_outputs());
    for (size_t i = 0; i < replicas; ++i) {
      if (at::GradMode::is_enabled() || !inputs[i].is_cpu()) apply_mask(i);
    }
    if (at::GradMode::is_enabled()) {
      differentiate(inputs, gradients, weight, results);
    } else {
      const bool needs_parameters = needs(weight_edge) || needs(weight_edge + 1);
      const ParameterGradients parameters =
          reduce(inputs, gradients, weight, needs_input, needs_residual,
                 needs_parameters ? std::optional(type_) : std::nullopt, results);
      for (size_t i = 0; i < replicas; ++i) {
        if (needs_residual(i)) apply_mask(i);
      }
      results[weight_edge] = parameters.weight;
      results[weight_edge + 1] = parameters.bias;
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
    return batch_norm_kernels(moments_[replica].device().type());
  }

  /// Writes the gradients of the inputs to `results` and returns those of the parameters, which are
  /// sums over all replicas.
  template <class NeedsResidual>
  ParameterGradients reduce(const std::vector<at::Tensor>& inputs,
                            std::vector<OutputGradient>& gradients, const at::Tensor& weight,
                            bool needs_input, const NeedsResidual& needs_residual,
                            std::optional<at::ScalarType> parameter_type,
                            variable_list& results) const {
    // All ranks agree on needs_input, which follows from the network.
    if (needs_input && inputs.size() == 1 && exchange_->ranks() == 1 &&
        kernels(0).fused_local_backward != nullptr) {
      return kernels(0).fused_local_backward(gradients[0], inputs[0], weight, moments_[0],
                                             invstds_[0], needs_residual(0), parameter_type,
                                             results[0]);
    }
    const auto on = [](at::Device device, const at::Tensor& shared) {
      return shared.defined() ? shared.to(device) : shared;
    };
    GradientSums all;
    at::Tensor before;  // the sums of the replicas so far
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_last = i + 1 == inputs.size();
      const at::Device device = inputs[i].device();
      all = kernels(i).backward_reduce(gradients[i], inputs[i], on(device, weight), moments_[i],
                                       invstds_[i], on(device, before),
                                       is_last ? parameter_type : std::nullopt);
      before = all.sums;
    }
    if (needs_input) {
      const at::Tensor sums = exchange_->sums(all.sums);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Device device = inputs[i].device();
        results[i] = kernels(i).backward_elementwise(gradients[i], inputs[i], on(device, weight),
                                                     moments_[i], invstds_[i], on(device, sums),
                                                     needs_residual(i));
      }
    }
    const at::Device first = inputs.front().device();
    return {on(first, all.parameters.weight), on(first, all.parameters.bias)};
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
                                                     weight, moments_.front(), eps_, exchange_);
    const auto parts = whole.input.split_with_sizes(rows);
    for (size_t i = 0; i < inputs.size(); ++i) results[i] = parts[i].to(inputs[i].device());
    results[inputs.size()] = whole.weight;
    results[inputs.size() + 1] = whole.bias;
  }

  c10::intrusive_ptr<Exchange> exchange_;
  double eps_;
  at::ScalarType type_ = at::kFloat;  ///< of weight and bias, for their gradients
  SavedVariable weight_;
  // One for each replica:
  std::vector<SavedVariable> inputs_, relu_masks_;
  std::vector<at::Tensor> moments_, invstds_;
};

c10::intrusive_ptr<Exchange> make_exchange(const Part& part, Timeout timeout) {
  return c10::make_intrusive<Exchange>(part.layer, part.input().size(1), part.input().scalar_type(),
                                       part.group ? part.group() : nullptr, timeout);
}

/// The forward of a layer without replicas.
Normalized normalize(Part& part, Timeout timeout) {
  const bool needs_gradients = SyncBatchNormNode::is_needed(std::array{&part});
  const at::NoGradGuard no_grad;
  const auto exchange = make_exchange(part, timeout);
  const BatchNormKernels& kernels = part.kernels();
  Normalized result;
  const at::Tensor moments = TapeScope::next([&] {
    const ForwardOptions options = options_of(part.arguments, /*updates=*/part.recorder == nullptr);
    result = exchange->ranks() == 1 && kernels.fused_local_forward != nullptr
                 ? kernels.fused_local_forward(part.input(), options)
                 : kernels.forward(part.input(),
                                   exchange->moments(kernels.moments(part.input(), options.eps)),
                                   options);
    use_moments(std::array{&part}, *exchange, result.moments);
    return result.moments;
  });
  if (!result.moments.defined()) {  // a checkpoint's recomputation
    result = kernels.forward(part.input(), moments.unsqueeze(0),
                             options_of(part.arguments, /*updates=*/false));
  }
  if (needs_gradients) part.node = make_node<SyncBatchNormNode>(std::array{&part}, exchange);
  return result;
}

/// Makes what the replicas of a layer share: the statistics and the autograd node.
void combine(std::span<Part* const> parts, Timeout timeout) {
  const Part& first = *parts.front();
  const at::Tensor& input = first.input();
  const bool needs_gradients = SyncBatchNormNode::is_needed(parts);
  const at::NoGradGuard no_grad;
  const auto exchange = make_exchange(first, timeout);
  std::vector<at::Tensor> rows;
  for (const Part* part : parts) rows.push_back(part->moments.to(input.device()));
  const auto merge = [&](const at::Tensor& all) {
    return first.kernels().merge(all, input.size(1), first.arguments.eps);
  };
  const at::Tensor moments = merge(exchange->moments(merge(at::stack(rows))));
  use_moments(parts, *exchange, moments);
  for (Part* part : parts) part->moments = moments.to(part->input().device());
  if (!needs_gradients) return;
  const auto node = make_node<SyncBatchNormNode>(parts, exchange);
  for (Part* part : parts) part->node = node;
}

/// The forward of one of a layer's replicas. Only replica 0 updates the running statistics.
Normalized normalize_with_replicas(const ReplicaScope& scope, Part& part, Timeout timeout) {
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
    part.moments = part.kernels().moments(part.input(), arguments.eps);
  }
  const std::string name = part.layer.given.empty() ? "a layer without a name"
                                                    : fmt::format("layer '{}'", part.layer.given);
  scope.team().meet(scope.replica(), {layer, name, &part, timeout},
                    [&](std::span<void* const> all) {
                      std::vector<Part*> parts;
                      for (void* const one : all) parts.push_back(static_cast<Part*>(one));
                      combine(parts, timeout);
                    });
  const at::NoGradGuard no_grad;
  const bool updates = part.updated && scope.replica() == 0;
  return part.kernels().forward(part.input(), part.moments.unsqueeze(0),
                                options_of(arguments, updates));
}

}  // namespace

BatchNormResult sync_batch_norm(const BatchNormArguments& arguments, const LayerName& layer,
                                const GetGroup& group, Timeout timeout) {
  check_input(arguments);
  if (arguments.input._fw_grad(/*level=*/0).defined()) {
    throw base::UserError("SyncBatchNorm: it has no forward-mode derivative; use backward()");
  }
  // Shows this call, which does not pass through the dispatcher, to profilers, with the sequence
  // number that `part` gets below.
  RECORD_FUNCTION(
      "syncbn::batch_norm",
      std::vector<c10::IValue>({arguments.input, arguments.weight, arguments.running_mean}),
      static_cast<int64_t>(at::sequence_number::peek()));
  Part part{.arguments = arguments, .layer = layer, .group = group};
  const ReplicaScope* const scope = group ? ReplicaScope::current() : nullptr;
  Normalized result =
      scope != nullptr ? normalize_with_replicas(*scope, part, timeout) : normalize(part, timeout);
  if (part.node) {
    part.node->set_output(scope != nullptr ? static_cast<size_t>(scope->replica()) : 0, result);
  }
  return {.output = result.output.values, .updated = part.updated};
}

}  // namespace syncbn::dist::detail

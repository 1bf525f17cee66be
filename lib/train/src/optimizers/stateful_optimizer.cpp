#include "optimizers/stateful_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace syncbn::train {
namespace {

constexpr const char* kStep = "step";

/// Whether the strides of two dense tensors are equal, except in dimensions of size 1.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

/// A copy of `values` on the device, of the type and with the strides of `parameter`.
at::Tensor copy_like(const at::Tensor& parameter, const at::Tensor& values) {
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(values);
  return copy;
}

}  // namespace

StatefulOptimizer::StatefulOptimizer(const NamedTensors& parameters, const CommonOptions& options,
                                     Traits traits)
    : traits_(std::move(traits)), base_lr_(options.lr), lr_batch_(options.lr_batch) {
  const std::vector<ParameterOptions> of_parameters = parameter_options(options, parameters);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    slots_.push_back({.name = name, .parameter = parameter, .options = of_parameters[i]});
    slots_.back().state.resize(traits_.keys.size());
  }
}

void StatefulOptimizer::step(double lr, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  const bool decides = found_inf.defined();
  std::optional<bool> is_skipped;  // known on the host only where an update needs it
  for (ParameterBatch& batch : batches(lr)) {
    if (batch.fused) {
      if (traits_.counts_steps) at::_foreach_add_(batch.counts, 1);
      update_fused(batch, decides ? std::optional(found_inf) : std::nullopt);
      if (traits_.counts_steps && decides) {
        at::_foreach_sub_(batch.counts, std::vector<at::Tensor>(batch.counts.size(), found_inf));
      }
      continue;
    }
    if (decides && !is_skipped) is_skipped = found_inf.item<float>() != 0;
    if (is_skipped.value_or(false)) continue;
    if (traits_.counts_steps) at::_foreach_add_(batch.counts, 1);
    batch.steps += 1;
    update_foreach(batch);
  }
}

void StatefulOptimizer::update_fused(ParameterBatch& /*batch*/,
                                     const std::optional<at::Tensor>& /*found_inf*/) {
  throw base::InternalError("optimizer " + traits_.type + " has no fused update");
}

std::vector<ParameterBatch> StatefulOptimizer::batches(double lr) {
  std::vector<ParameterBatch> batches;
  for (Slot& slot : slots_) {
    at::Tensor gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    if (!traits_.no_sparse.empty() && gradient.layout() != at::kStrided) {
      throw base::UserError(
          fmt::format("optimizer {}: the gradient of parameter '{}' is sparse; {}", traits_.type,
                      slot.name, traits_.no_sparse));
    }
    for (at::Tensor& tensor : slot.state) {
      if (!tensor.defined()) tensor = at::zeros_like(slot.parameter);
    }
    const bool fused = can_fuse(slot, gradient);
    double steps = 0;
    if (traits_.counts_steps) {
      if (!slot.count.defined()) {
        slot.count = at::zeros({}, slot.parameter.options().dtype(at::kFloat).requires_grad(false));
      }
      if (!fused) steps = slot.count.item<double>();
    }
    // The fused operators for CPUs ignore strides.
    if (fused && !have_same_layout(slot.parameter, gradient)) {
      gradient = copy_like(slot.parameter, gradient);
    }
    auto found = std::ranges::find_if(batches, [&](const ParameterBatch& batch) {
      const at::Tensor& first = batch.parameters.front();
      return batch.fused == fused && batch.steps == steps && batch.options == slot.options &&
             first.device() == slot.parameter.device() &&
             first.scalar_type() == slot.parameter.scalar_type();
    });
    if (found == batches.end()) {
      found = batches.emplace(batches.end());
      found->fused = fused;
      found->steps = steps;
      found->options = slot.options;
      found->lr = slot.options.rate(base_lr_, lr);
      found->weight_decay = slot.options.weight_decay;
      found->state.resize(slot.state.size());
    }
    found->parameters.push_back(slot.parameter);
    found->gradients.push_back(std::move(gradient));
    if (traits_.counts_steps) found->counts.push_back(slot.count);
    for (size_t i = 0; i < slot.state.size(); ++i) found->state[i].push_back(slot.state[i]);
  }
  return batches;
}

bool StatefulOptimizer::can_fuse(const Slot& slot, const at::Tensor& gradient) const {
  return traits_.fused && gradient.layout() == at::kStrided &&
         at::isFloatingType(slot.parameter.scalar_type()) &&
         slot.parameter.is_non_overlapping_and_dense() &&
         (slot.parameter.is_cpu() || slot.parameter.is_cuda());
}

OptimizerState StatefulOptimizer::state() const {
  OptimizerState state;
  for (const Slot& slot : slots_) {
    for (size_t i = 0; i < slot.state.size(); ++i) {
      if (slot.state[i].defined()) state[slot.name][traits_.keys[i]] = slot.state[i];
    }
    if (slot.count.defined()) state[slot.name][kStep] = slot.count;
  }
  return state;
}

void StatefulOptimizer::load(const OptimizerState& state) {
  std::vector<Slot> loaded = slots_;
  for (Slot& slot : loaded) {
    slot.state.assign(traits_.keys.size(), at::Tensor());
    slot.count = at::Tensor();
  }
  for (const auto& [name, tensors] : state) {
    const auto slot = std::ranges::find(loaded, name, &Slot::name);
    if (slot == loaded.end()) {
      throw base::UserError(
          fmt::format("the optimizer's state is of a parameter '{}' that this model lacks", name));
    }
    for (const auto& [key, tensor] : tensors) {
      if (key == kStep) {
        if (traits_.counts_steps) {
          slot->count = tensor.to(slot->parameter.options().dtype(at::kFloat).requires_grad(false),
                                  /*non_blocking=*/false, /*copy=*/true);
        }
        continue;
      }
      if (tensor.sizes() != slot->parameter.sizes()) {
        throw base::UserError(fmt::format(
            "the optimizer's {} of parameter '{}' has shape [{}], the parameter [{}]", key,
            slot->name, fmt::join(tensor.sizes(), ", "), fmt::join(slot->parameter.sizes(), ", ")));
      }
      const auto known = std::ranges::find(traits_.keys, key);
      // Other options may have left state that is not needed now, such as momentum.
      if (known == traits_.keys.end()) continue;
      slot->state[static_cast<size_t>(known - traits_.keys.begin())] =
          copy_like(slot->parameter, tensor);
    }
  }
  slots_ = std::move(loaded);
}

}  // namespace syncbn::train

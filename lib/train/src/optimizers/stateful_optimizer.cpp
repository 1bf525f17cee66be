#include "optimizers/stateful_optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
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

/// A copy of `values` with the device, type and strides of `parameter`.
at::Tensor copy_like(const at::Tensor& parameter, const at::Tensor& values) {
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(values);
  return copy;
}

}  // namespace

ParameterBatch::Tensors ParameterBatch::decayed_gradients() const {
  if (weight_decay == 0) return gradients;
  return at::_foreach_add(gradients, parameters, weight_decay);
}

StatefulOptimizer::StatefulOptimizer(const CommonOptions& options, const NamedTensors& parameters,
                                     Traits traits)
    : base_lr_(options.lr), lr_batch_(options.lr_batch), traits_(std::move(traits)) {
  const std::vector<ParameterRates> rates = parameter_rates(options, parameters);
  for (const auto& [name, parameter] : parameters) {
    slots_.push_back({.name = name, .parameter = parameter, .rates = rates[slots_.size()]});
    slots_.back().state.resize(traits_.keys.size());
  }
}

std::vector<Optimizer::Group> StatefulOptimizer::groups() const {
  std::vector<Group> groups;
  for (const Slot& slot : slots_) {
    auto found = std::ranges::find_if(groups, [&](const Group& group) {
      return ParameterRates{group.lr, group.weight_decay} == slot.rates;
    });
    if (found == groups.end()) {
      found = groups.insert(
          groups.end(),
          {.parameters = {}, .lr = slot.rates.lr, .weight_decay = slot.rates.weight_decay});
    }
    found->parameters.emplace_back(slot.name, slot.parameter);
  }
  return groups;
}

void StatefulOptimizer::step(double lr, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  const std::vector<SlotGroup> groups = slots_to_update();
  // The fused operators compare with 1.
  at::Tensor skips = found_inf.defined() ? found_inf.ne(0).to(at::kFloat) : at::Tensor();
  const auto needs_host = [](const SlotGroup& group) {
    return !group.fused || group.is_first_step;
  };
  if (skips.defined() && std::ranges::any_of(groups, needs_host)) {
    if (skips.item<float>() != 0) return;
    skips = at::Tensor();
  }
  std::vector<ParameterBatch> batches;
  for (const SlotGroup& group : groups) {
    ParameterBatch& batch = batches.emplace_back(make_batch(group, lr));
    if (skips.defined()) {
      batch.found_inf = skips.to(batch.parameters.front().device(), /*non_blocking=*/true);
    }
  }
  prepare(batches);
  for (ParameterBatch& batch : batches) {
    if (traits_.counts_steps) {
      if (batch.found_inf) {
        at::_foreach_add_(batch.counts, 1 - *batch.found_inf);
      } else {
        at::_foreach_add_(batch.counts, 1);
      }
    }
    if (batch.fused) {
      update_fused(batch);
    } else {
      update_foreach(batch);
    }
  }
}

std::vector<StatefulOptimizer::SlotGroup> StatefulOptimizer::slots_to_update() {
  std::vector<SlotGroup> groups;
  for (Slot& slot : slots_) {
    if (!slot.parameter.grad().defined()) continue;
    check_layout(slot);
    const bool fused = can_fuse(slot);
    const bool first = traits_.first_step_differs && !slot.state.front().defined();
    auto found = std::ranges::find_if(groups, [&](const SlotGroup& group) {
      const Slot& other = *group.slots.front();
      return group.fused == fused && group.is_first_step == first && other.rates == slot.rates &&
             other.parameter.device() == slot.parameter.device() &&
             other.parameter.scalar_type() == slot.parameter.scalar_type();
    });
    if (found == groups.end()) {
      found = groups.insert(groups.end(), {.slots = {}, .fused = fused, .is_first_step = first});
    }
    found->slots.push_back(&slot);
  }
  return groups;
}

void StatefulOptimizer::check_layout(const Slot& slot) const {
  if (slot.parameter.grad().layout() == at::kStrided) return;
  const bool is_usable = traits_.sparse == Sparse::kWithoutWeightDecay;
  if (is_usable && slot.rates.weight_decay == 0) return;
  throw base::UserError(fmt::format("optimizer {}: the gradient of parameter '{}' is sparse; {}",
                                    traits_.type, slot.name,
                                    is_usable ? "set weight_decay to 0" : "use sgd"));
}

bool StatefulOptimizer::can_fuse(const Slot& slot) const {
  return traits_.fused && slot.parameter.grad().layout() == at::kStrided &&
         at::isFloatingType(slot.parameter.scalar_type()) &&
         slot.parameter.is_non_overlapping_and_dense() &&
         (slot.parameter.is_cpu() || slot.parameter.is_cuda());
}

at::Tensor StatefulOptimizer::make_count(float updates, const Slot& slot) const {
  const at::Device device = traits_.fused ? slot.parameter.device() : at::Device(at::kCPU);
  return at::full({}, updates, at::TensorOptions(at::kFloat).device(device));
}

ParameterBatch StatefulOptimizer::make_batch(const SlotGroup& group, double lr) const {
  const ParameterRates& rates = group.slots.front()->rates;
  ParameterBatch batch;
  // In this order, both results are exact while the schedule leaves the rate unchanged.
  batch.lr = rates.lr == base_lr_ ? lr : rates.lr * (lr / base_lr_);
  batch.weight_decay = rates.weight_decay;
  batch.fused = group.fused;
  batch.is_first_step = group.is_first_step;
  batch.state.resize(traits_.keys.size());
  for (Slot* const slot : group.slots) {
    at::Tensor gradient = slot->parameter.grad();
    // The fused operators for CPUs ignore strides.
    if (group.fused && !have_same_layout(slot->parameter, gradient)) {
      gradient = copy_like(slot->parameter, gradient);
    }
    batch.parameters.push_back(slot->parameter);
    batch.gradients.push_back(std::move(gradient));
    for (size_t i = 0; i < slot->state.size(); ++i) {
      at::Tensor& tensor = slot->state[i];
      if (!tensor.defined()) tensor = at::zeros_like(slot->parameter);
      batch.state[i].push_back(tensor);
    }
    if (!traits_.counts_steps) continue;
    if (!slot->count.defined()) slot->count = make_count(0, *slot);
    batch.counts.push_back(slot->count);
  }
  return batch;
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
        if (traits_.counts_steps) slot->count = make_count(tensor.item<float>(), *slot);
        continue;
      }
      if (tensor.sizes() != slot->parameter.sizes()) {
        throw base::UserError(fmt::format(
            "the optimizer's {} of parameter '{}' has shape [{}], the parameter [{}]", key,
            slot->name, fmt::join(tensor.sizes(), ", "), fmt::join(slot->parameter.sizes(), ", ")));
      }
      const auto known = std::ranges::find(traits_.keys, key);
      // The state may come from other options and include what is not needed, such as momentum.
      if (known == traits_.keys.end()) continue;
      slot->state[static_cast<size_t>(known - traits_.keys.begin())] =
          copy_like(slot->parameter, tensor);
    }
  }
  slots_ = std::move(loaded);
}

}  // namespace syncbn::train

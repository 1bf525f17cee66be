#include "optimizers/stateful_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace syncbn::train {
namespace {

constexpr const char* kStep = "step";

/// Whether the same offset in memory is the same element in both; both are dense. Strides of
/// dimensions of one element say nothing.
bool laid_out_alike(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& values) {
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(values);
  return copy;
}

}  // namespace

StatefulOptimizer::StatefulOptimizer(const NamedTensors& parameters, Traits traits)
    : traits_(std::move(traits)) {
  for (const auto& [name, parameter] : parameters) {
    slots_.push_back({.name = name,
                      .parameter = parameter,
                      .memory = std::vector<at::Tensor>(traits_.keys.size())});
  }
}

void StatefulOptimizer::step(double lr) {
  const at::NoGradGuard no_grad;
  for (Batch& batch : batches()) {
    if (batch.fused) {
      update_fused(batch, lr);
    } else {
      update_foreach(batch, lr);
    }
  }
}

std::vector<StatefulOptimizer::Batch> StatefulOptimizer::batches() {
  std::vector<Batch> batches;
  for (Slot& slot : slots_) {
    at::Tensor gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    check_sparse(slot);
    for (at::Tensor& tensor : slot.memory) {
      if (!tensor.defined()) tensor = at::zeros_like(slot.parameter);
    }
    if (traits_.counts_steps) ++slot.steps;
    const bool fused = can_fuse(slot, gradient);
    // The fused operators on CPUs go through memory without a look at strides.
    if (fused && !laid_out_alike(slot.parameter, gradient)) {
      gradient = laid_out_as(slot.parameter, gradient);
    }
    auto found = std::ranges::find_if(batches, [&](const Batch& batch) {
      const at::Tensor& first = batch.parameters.front();
      return batch.fused == fused && batch.steps == slot.steps &&
             first.device() == slot.parameter.device() &&
             first.scalar_type() == slot.parameter.scalar_type();
    });
    if (found == batches.end()) {
      found = batches.emplace(batches.end());
      found->fused = fused;
      found->steps = slot.steps;
      found->memory.resize(slot.memory.size());
    }
    found->parameters.push_back(slot.parameter);
    found->gradients.push_back(std::move(gradient));
    for (size_t i = 0; i < slot.memory.size(); ++i) found->memory[i].push_back(slot.memory[i]);
  }
  return batches;
}

bool StatefulOptimizer::can_fuse(const Slot& slot, const at::Tensor& gradient) const {
  return traits_.fused && gradient.layout() == at::kStrided &&
         at::isFloatingType(slot.parameter.scalar_type()) &&
         slot.parameter.is_non_overlapping_and_dense() &&
         (slot.parameter.is_cpu() || slot.parameter.is_cuda());
}

void StatefulOptimizer::check_sparse(const Slot& slot) const {
  if (traits_.no_sparse.empty() || slot.parameter.grad().layout() == at::kStrided) return;
  throw base::UserError(fmt::format("optimizer {}: the gradient of parameter '{}' is sparse; {}",
                                    traits_.type, slot.name, traits_.no_sparse));
}

OptimizerState StatefulOptimizer::state() const {
  OptimizerState state;
  for (const Slot& slot : slots_) {
    for (size_t i = 0; i < slot.memory.size(); ++i) {
      if (slot.memory[i].defined()) state[slot.name][traits_.keys[i]] = slot.memory[i];
    }
    if (slot.steps > 0) state[slot.name][kStep] = at::full({}, slot.steps, at::kFloat);
  }
  return state;
}

void StatefulOptimizer::load(const OptimizerState& state) {
  std::vector<Slot> loaded;
  for (const Slot& slot : slots_) {
    loaded.push_back({.name = slot.name,
                      .parameter = slot.parameter,
                      .memory = std::vector<at::Tensor>(traits_.keys.size())});
  }
  for (const auto& [name, tensors] : state) load_slot(find(loaded, name), tensors);
  slots_ = std::move(loaded);
}

StatefulOptimizer::Slot& StatefulOptimizer::find(std::vector<Slot>& slots,
                                                 const std::string& name) const {
  const auto found = std::ranges::find(slots, name, &Slot::name);
  if (found != slots.end()) return *found;
  throw base::UserError(
      fmt::format("the optimizer's state is of a parameter '{}' that this model lacks", name));
}

void StatefulOptimizer::load_slot(Slot& slot,
                                  const std::map<std::string, at::Tensor>& tensors) const {
  for (const auto& [key, tensor] : tensors) {
    if (key == kStep) {
      slot.steps = traits_.counts_steps ? tensor.item<int64_t>() : 0;
      continue;
    }
    if (tensor.sizes() != slot.parameter.sizes()) {
      throw base::UserError(fmt::format(
          "the optimizer's {} of parameter '{}' has shape [{}], the parameter [{}]", key, slot.name,
          fmt::join(tensor.sizes(), ", "), fmt::join(slot.parameter.sizes(), ", ")));
    }
    const auto known = std::ranges::find(traits_.keys, key);
    // What is not known is of other options, such as a momentum that is now 0.
    if (known == traits_.keys.end()) continue;
    slot.memory[static_cast<size_t>(known - traits_.keys.begin())] =
        laid_out_as(slot.parameter, tensor);
  }
}

}  // namespace syncbn::train

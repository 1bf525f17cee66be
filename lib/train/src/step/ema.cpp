#include "step/ema.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "step/model.h"

namespace syncbn::train {

Ema::Ema(const EmaConfig& config, const models::Model& model) : config_(config) {
  const at::NoGradGuard no_grad;
  for (const bool averaged : {true, false}) {
    for (const auto& [name, tensor] : state_of(model)) {
      if (tensor.is_floating_point() != averaged) continue;
      values_.push_back(tensor.detach());
      average_list_.push_back(tensor.detach().clone());
      averages_[name] = average_list_.back();
    }
    if (averaged) averaged_ = values_.size();
  }
}

void Ema::update(int64_t step, bool copies) {
  if (step % config_.every != 0) return;
  const at::NoGradGuard no_grad;
  const at::TensorList values(values_);
  const at::TensorList averages(average_list_);
  if (copies) {
    at::_foreach_copy_(averages, values);
    return;
  }
  at::_foreach_lerp_(averages.slice(0, averaged_), values.slice(0, averaged_), 1 - config_.decay);
  const size_t copied = values_.size() - averaged_;
  if (copied > 0) {
    at::_foreach_copy_(averages.slice(averaged_, copied), values.slice(averaged_, copied));
  }
}

void Ema::load(const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  for (auto& [name, average] : averages_) average.copy_(state.at(name));
}

void Ema::swap() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < values_.size(); ++i) {
    const at::Tensor value = values_[i].clone();
    values_[i].copy_(average_list_[i]);
    average_list_[i].copy_(value);
  }
}

}  // namespace syncbn::train

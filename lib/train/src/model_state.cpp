#include "model_state.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::train {

NamedTensors trainable_parameters(const models::Model& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) all.emplace_back(item.key(), item.value());
  }
  return all;
}

std::map<std::string, at::Tensor> state_of(const models::Model& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model.named_parameters()) all[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) all[item.key()] = item.value();
  return all;
}

void load_model(const std::map<std::string, at::Tensor>& saved, const models::Model& model) {
  const at::NoGradGuard no_grad;
  auto present = state_of(model);
  if (saved.size() != present.size()) {
    throw base::UserError(fmt::format("it has {}, the model of this configuration has {}",
                                      base::counted(saved.size(), "tensor"), present.size()));
  }
  for (auto& [name, tensor] : present) {
    const auto found = saved.find(name);
    if (found == saved.end()) throw base::UserError(fmt::format("it has no tensor '{}'", name));
    if (found->second.sizes() != tensor.sizes()) {
      throw base::UserError(fmt::format("its tensor '{}' has another shape", name));
    }
    tensor.copy_(found->second);
  }
}

}  // namespace syncbn::train

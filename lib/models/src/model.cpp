#include <syncbn/models/model.h>

#include <ATen/core/grad_mode.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/kept_random_state.h>
#include <syncbn/models/weights.h>

#include <utility>

#include "families.h"

namespace syncbn::models {

std::vector<at::Tensor> Model::forward_all(at::Tensor input) {
  return {forward(std::move(input))};
}

std::shared_ptr<Model> cloneable(std::function<std::shared_ptr<Model>()> make) {
  auto model = make();
  model->make_another_ = [make = std::move(make)] { return cloneable(make); };
  return model;
}

std::shared_ptr<torch::nn::Module> Model::clone(const std::optional<at::Device>& device) const {
  if (!make_another_) return Module::clone(device);
  const at::NoGradGuard no_grad;
  const dist::detail::KeptRandomState kept;
  const auto copy = make_another_();
  const StateDict own = state_dict(*this);
  StateDict copied = state_dict(*copy);
  const auto own_parts = modules();
  const auto copied_parts = copy->modules();
  if (own.keys() != copied.keys() || own_parts.size() != copied_parts.size()) {
    throw base::UserError(
        "clone(): layers were added to the model or removed since it was made; clone it before");
  }
  for (const auto& item : own) {
    const at::Tensor& from = item.value();
    at::Tensor& to = copied[item.key()];
    to.set_data(from.to(device.value_or(from.device()), from.scalar_type(), /*non_blocking=*/false,
                        /*copy=*/true));
    to.set_requires_grad(from.requires_grad());
  }
  // train() is recursive: outer modules first
  for (size_t i = 0; i < own_parts.size(); ++i) copied_parts[i]->train(own_parts[i]->is_training());
  return copy;
}

ModelKind::Registry& ModelKind::registry() {
  static Registry registry(
      "model",
      {add_digits, add_resnets, add_vggs, add_mobilenets, add_efficientnets, add_densenets,
       add_regnets, add_convnexts, add_shufflenets, add_mnasnets, add_squeezenets, add_inceptions,
       add_segmentation_networks, add_gans, add_retinanets, add_fcos, add_scripts});
  return registry;
}

}  // namespace syncbn::models

#include <syncbn/models/model.h>

#include <utility>

#include "families.h"

namespace syncbn::models {

std::vector<at::Tensor> Model::forward_all(at::Tensor input) {
  return {forward(std::move(input))};
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

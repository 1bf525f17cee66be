#include <syncbn/models/digits_net.h>
#include <syncbn/models/model.h>

#include <utility>

#include "families.h"
#include "script_model.h"

namespace syncbn::models {

std::vector<at::Tensor> Model::forward_all(at::Tensor input) {
  return {forward(std::move(input))};
}

ModelKind::Registry& ModelKind::registry() {
  static Registry registry = [] {
    Registry made("model");
    made.add<DigitsNetOptions>("digits", "three convolutions and a linear layer, for tiny images",
                               [](const DigitsNetOptions& options, const ModelArgs& args) {
                                 return digits_net(args, options);
                               });
    add_resnets(made);
    add_vggs(made);
    add_mobilenets(made);
    add_efficientnets(made);
    add_densenets(made);
    add_regnets(made);
    add_convnexts(made);
    add_shufflenets(made);
    add_mnasnets(made);
    add_squeezenets(made);
    add_inceptions(made);
    add_segmentation_networks(made);
    add_gans(made);
    add_retinanets(made);
    add_fcos(made);
    made.add<ScriptOptions>("torchscript", "a network that Python has scripted, from a file",
                            script_model);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::models

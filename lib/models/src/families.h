#pragma once

#include <syncbn/models/model.h>

#include <memory>
#include <string>

namespace syncbn::models {

/// Registers a network that make(name, args, options, shape...) makes.
template <class Options, class Make, class... Shape>
void add_model(ModelKind::Registry& registry, const std::string& name, const std::string& help,
               Make make, const Shape&... shape) {
  registry.add<Options>(name, help, [=](const Options& options, const ModelArgs& args) {
    return cloneable([=] { return make(name, args, options, shape...); });
  });
}

/// Registers a network that is constructed as Net(name, args, options, shape...).
template <class Options, class Net, class... Shape>
void add_network(ModelKind::Registry& registry, const std::string& name, const std::string& help,
                 const Shape&... shape) {
  const auto make = [](const auto&... all) { return std::make_shared<Net>(all...); };
  add_model<Options>(registry, name, help, make, shape...);
}

// Each function registers the networks of one file, under torchvision's names where it has them.
void add_digits(ModelKind::Registry& registry);
void add_scripts(ModelKind::Registry& registry);
void add_resnets(ModelKind::Registry& registry);
void add_vggs(ModelKind::Registry& registry);
void add_mobilenets(ModelKind::Registry& registry);
void add_efficientnets(ModelKind::Registry& registry);
void add_densenets(ModelKind::Registry& registry);
void add_regnets(ModelKind::Registry& registry);
void add_convnexts(ModelKind::Registry& registry);
void add_shufflenets(ModelKind::Registry& registry);
void add_mnasnets(ModelKind::Registry& registry);
void add_gans(ModelKind::Registry& registry);
void add_inceptions(ModelKind::Registry& registry);
void add_segmentation_networks(ModelKind::Registry& registry);
void add_retinanets(ModelKind::Registry& registry);
void add_fcos(ModelKind::Registry& registry);
void add_squeezenets(ModelKind::Registry& registry);

}  // namespace syncbn::models

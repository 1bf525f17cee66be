#include "batch_norm/layer_places.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {

LayerPlaces layer_places(torch::nn::Module& root) {
  LayerPlaces places;
  const auto add = [&](torch::nn::Module& container, auto& place) {
    const LayerPlace one(container, place);
    places[one.layer().get()].push_back(one);
  };
  for_each_named_module(root, [&](const std::string&, torch::nn::Module& one) {
    if (auto* const sequential = one.as<torch::nn::SequentialImpl>()) {
      for (auto& module : *sequential) add(one, module);
    } else if (auto* const list = one.as<torch::nn::ModuleListImpl>()) {
      for (auto& module : *list) add(one, module);
    } else if (auto* const dict = one.as<torch::nn::ModuleDictImpl>()) {
      for (auto& item : *dict) add(one, item.value());
    }
  });
  return places;
}

bool is_held_elsewhere(const torch::nn::Module& module, const std::vector<LayerPlace>& places) {
  // A container holds a module twice: by its place, and as a registered child.
  return module.weak_from_this().use_count() > 2 * static_cast<long>(places.size());
}

}  // namespace syncbn::dist::detail

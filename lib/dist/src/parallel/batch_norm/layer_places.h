#pragma once

#include <map>
#include <memory>
#include <vector>

#include <torch/nn/modules/container/any.h>

namespace syncbn::dist::detail {

/// A place of a layer in a Sequential, ModuleList or ModuleDict.
class LayerPlace {
 public:
  LayerPlace(torch::nn::Module& container, torch::nn::AnyModule& called)
      : container_(&container), called_(&called) {}
  LayerPlace(torch::nn::Module& container, std::shared_ptr<torch::nn::Module>& kept)
      : container_(&container), kept_(&kept) {}

  /// Whether the container calls the layer, as Sequential does. Users of ModuleList and ModuleDict
  /// call it themselves, as the type that they know.
  bool is_called() const { return called_ != nullptr; }

  std::shared_ptr<torch::nn::Module> layer() const { return called_ ? called_->ptr() : *kept_; }

  /// Replaces the layer by another one, under the same name.
  template <class Layer>
  void put(const std::shared_ptr<Layer>& other) const {
    const auto before = layer();
    if (called_ != nullptr) {
      *called_ = torch::nn::AnyModule(other);
    } else {
      *kept_ = other;
    }
    for (const auto& child : container_->named_children()) {
      if (child.value() == before) container_->replace_module(child.key(), other);
    }
  }

 private:
  torch::nn::Module* container_;
  torch::nn::AnyModule* called_ = nullptr;
  std::shared_ptr<torch::nn::Module>* kept_ = nullptr;
};

/// The places of each module in the containers below `root`, and in `root` itself. Valid until a
/// container changes.
using LayerPlaces = std::map<const torch::nn::Module*, std::vector<LayerPlace>>;
LayerPlaces layer_places(torch::nn::Module& root);

/// Whether something besides the module's places holds it, such as a ModuleHolder member, which
/// would keep using this module after LayerPlace::put().
bool is_held_elsewhere(const torch::nn::Module& module, const std::vector<LayerPlace>& places);

}  // namespace syncbn::dist::detail

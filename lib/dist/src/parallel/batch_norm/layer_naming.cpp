#include "batch_norm/layer_naming.h"

#include "batch_norm/exchange.h"
#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {

void LayerNaming::name_layers(const torch::nn::Module& module) {
  for_each_named_module(module, [](const std::string& name, const torch::nn::Module& one) {
    const auto* layer = one.as<SyncBatchNormImpl>();
    if (layer != nullptr && layer->options.name().empty()) layer->name_->given = name;
  });
}

}  // namespace syncbn::dist::detail

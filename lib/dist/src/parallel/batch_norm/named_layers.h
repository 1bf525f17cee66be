#pragma once

#include <string>
#include <unordered_set>

#include <torch/nn/module.h>

namespace syncbn::dist::detail {

/// Calls visit(name, module) for `module` itself, as "", and each module below it once, by the
/// first of its names.
template <class Visit>
void for_each_named_module(const torch::nn::Module& module, const Visit& visit) {
  std::unordered_set<const torch::nn::Module*> seen{&module};
  visit("", module);
  // Without the root, which no shared_ptr needs to own then.
  for (const auto& item : module.named_modules({}, /*include_self=*/false)) {
    if (seen.insert(item.value().get()).second) visit(item.key(), *item.value());
  }
}

}  // namespace syncbn::dist::detail

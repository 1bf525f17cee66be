#pragma once

#include <ostream>
#include <string>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>

namespace syncbn::dist::detail {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Each tensor of named_parameters() or named_buffers() (or TorchScript's) with its first name.
template <class List>
std::vector<NamedTensor> distinct(const List& list) {
  std::vector<NamedTensor> all;
  std::unordered_set<const at::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) all.push_back({name, tensor});
  };
  for (const auto& item : list) {
    if constexpr (requires { item.key(); }) {
      add(item.key(), item.value());
    } else {
      add(item.name, item.value);
    }
  }
  return all;
}

/// Calls visit(name, module) for `module`, as "", and for each module below it by its first name.
template <class Module, class Visit>
void for_each_named_module(Module& module, const Visit& visit) {
  std::unordered_set<const torch::nn::Module*> seen{&module};
  visit("", module);
  // named_modules() can include the root only if a shared_ptr owns it.
  for (const auto& item : module.named_modules({}, /*include_self=*/false)) {
    if (seen.insert(item.value().get()).second) visit(item.key(), *item.value());
  }
}

/// Calls visit(layer) if the module is one of libtorch's batch-norm layers.
template <class Module, class Visit>
void visit_batch_norm(Module& module, const Visit& visit) {
  if (auto* one = module.template as<torch::nn::BatchNorm1dImpl>()) return visit(*one);
  if (auto* two = module.template as<torch::nn::BatchNorm2dImpl>()) return visit(*two);
  if (auto* three = module.template as<torch::nn::BatchNorm3dImpl>()) visit(*three);
}

/// The tensors of a layer, found by their usual names; undefined if it has none.
struct NormTensors {
  at::Tensor running_mean, running_var, num_batches_tracked, weight;
};
NormTensors norm_tensors(const torch::nn::Module& module);

/// Prints a layer that shares statistics.
/// @tparam Options SyncBatchNormOptions, or BatchNormOptions of a converted layer
template <class Options>
void print_sync_batch_norm(std::ostream& stream, const Options& options) {
  stream << fmt::format(
      "syncbn::dist::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={})",
      options.num_features(), options.eps(),
      options.momentum() ? fmt::format("{}", *options.momentum()) : "none", options.affine(),
      options.track_running_stats());
}

/// Names SyncBatchNorm layers by their place in `module`, unless their options have a name.
void name_layers(const torch::nn::Module& module);

/// The group over which a layer exchanges, created at its first use; null: no exchange.
/// @throws base::UserError as statistics_group() and statistics_subgroup() do.
ProcessGroupPtr statistics_group_of(const SyncBatchNormOptions& options);

}  // namespace syncbn::dist::detail

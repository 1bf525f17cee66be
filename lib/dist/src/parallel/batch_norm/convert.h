#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <syncbn/dist/process_group.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

// The registry of converted layers. aten::batch_norm sees only tensors, so a layer is recognised by
// its running mean, or else its weight: to() and loading a state keep their TensorImpl.

struct ConvertedLayer {
  std::shared_ptr<const LayerName> name;
  ProcessGroupPtr group;  ///< empty: the group of statistics_group()
  Timeout timeout;
  /// Without running statistics, evaluation too calls aten::batch_norm with training=true.
  std::function<bool()> is_training;
  /// The module increments it before its call; undefined if it has none.
  std::function<at::Tensor()> num_batches_tracked;
  /// Drops what keeps a destroyed module's tensors in memory. May be empty.
  std::function<void()> release = {};
  bool is_local = false;    ///< exchanges nothing, whatever the group
  bool is_script = false;   ///< runs through syncbn::batch_norm
  bool has_weight = false;  ///< set by register_layer()
};

/// Shares the statistics of the layer with these tensors, of which one may be undefined.
void register_layer(const at::Tensor& running_mean, const at::Tensor& weight, ConvertedLayer layer);

void unregister_layer(const at::Tensor& running_mean, const at::Tensor& weight);

/// For tests: the number of registered tensors. A layer has one or two.
size_t registered_keys();

/// The group that a layer was converted with, in training or not; nullopt if it was not converted.
std::optional<ProcessGroupPtr> converted_group(const at::Tensor& running_mean,
                                               const at::Tensor& weight);

/// Whether a converted layer in training computes its statistics with other ranks or replicas.
bool shares_statistics(const at::Tensor& running_mean, const at::Tensor& weight);

/// Once per process: overrides aten::batch_norm, and defines what replaces TorchScript's operators.
void install_operators();

/// Whether the parameter belongs to a replica of torch::nn::parallel::data_parallel.
bool is_replica(const at::Tensor& parameter);

/// @throws base::UserError: the layer runs as such a replica.
[[noreturn]] void throw_is_replica(const LayerName& layer);

/// Runs TorchScript and rethrows what a layer threw; its interpreter throws std::runtime_error.
c10::IValue run_script(const std::function<c10::IValue()>& body);

}  // namespace syncbn::dist::detail

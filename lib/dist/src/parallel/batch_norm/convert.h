#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <syncbn/dist/process_group.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

// The layers whose statistics are shared, whatever module they belong to. A layer is known by its
// running mean, or, without running statistics, by its weight: the tensors that aten::batch_norm
// gets, whose TensorImpl stays the same through to() and loading a state.

struct ConvertedLayer {
  std::shared_ptr<const LayerName> name;
  ProcessGroupPtr group;  ///< may be empty: the group of statistics_group()
  Timeout timeout;
  /// Asked where it matters: a layer without running statistics calls aten::batch_norm with
  /// training=true in evaluation too.
  std::function<bool()> is_training;
  /// Counted up by the module ahead of its call; undefined when it has none.
  std::function<at::Tensor()> num_batches_tracked;
  /// Once the module is destroyed: drops what still keeps its tensors in memory. May be empty.
  std::function<void()> let_go = {};
  bool alone = false;       ///< nothing is exchanged, whatever the group
  bool is_script = false;   ///< only script_batch_norm() is for it
  bool has_weight = false;  ///< register_layer() sets it
};

/// Shares the statistics of the layer with this key tensor from now on.
/// @param weight of the layer, if any: by it replicas are recognised.
void register_layer(const at::Tensor& key, const at::Tensor& weight, ConvertedLayer layer);

void unregister_layer(const at::Tensor& key, const at::Tensor& weight);

/// For tests: the number of keys, of which a layer has one or two.
size_t registered_keys();

/// The group that a layer with this key was converted with, training or not; nullopt when it was
/// not converted.
std::optional<ProcessGroupPtr> converted_group(const at::Tensor& key);

/// The tensor to know a layer by; undefined when it has neither.
at::Tensor layer_key(const at::Tensor& running_mean, const at::Tensor& weight);

/// Puts what shares the statistics of layers that were converted in front of aten::batch_norm, once
/// per process.
void install_batch_norm_override();

/// What aten::batch_norm of a TorchScript module becomes. Of a layer that was not converted, such
/// as a copy's, it is libtorch's.
/// @throws base::UserError for one value per channel where nothing is exchanged.
at::Tensor script_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias,
                             const std::optional<at::Tensor>& running_mean,
                             const std::optional<at::Tensor>& running_var, bool training,
                             double momentum, double eps, bool cudnn_enabled);

/// Runs code of a TorchScript module. Its interpreter makes std::runtime_error of any exception:
/// what a layer threw comes out here as it was.
c10::IValue run_script(const std::function<c10::IValue()>& body);

}  // namespace syncbn::dist::detail

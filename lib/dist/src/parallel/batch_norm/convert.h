#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <syncbn/dist/process_group.h>
#include <torch/nn/module.h>
#include <torch/nn/options/batchnorm.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

// The registry of converted layers. aten::batch_norm sees only tensors, so it recognises a layer by
// the TensorImpl of its running mean, or else of its weight. to() and loading a state keep these.

struct ConvertedLayer {
  std::shared_ptr<const LayerName> name;
  ProcessGroupPtr group;  ///< empty: the group of statistics_group()
  Timeout timeout;
  /// Needed because without running statistics, evaluation also calls aten::batch_norm with
  /// training=true.
  std::function<bool()> is_training;
  /// The counter, which the module increments before it calls aten::batch_norm; undefined if it has
  /// none.
  std::function<at::Tensor()> num_batches_tracked;
  /// Drops references that keep the tensors of a destroyed module in memory. May be empty.
  std::function<void()> release = {};
  bool is_local = false;    ///< exchanges nothing, whatever the group
  bool is_script = false;   ///< runs through syncbn::batch_norm
  bool has_weight = false;  ///< set by register_layer()
};

/// The tensor that identifies a layer; undefined for a layer that has neither.
inline const at::Tensor& layer_key(const at::Tensor& running_mean, const at::Tensor& weight) {
  return running_mean.defined() ? running_mean : weight;
}

/// This thread's forward of a converted layer of libtorch's with one value per channel, from
/// _check_input_dim() to aten::batch_norm.
struct OneValueForward {
  const void* layer = nullptr;
  const at::TensorImpl* key = nullptr;  ///< of the module's layer, if a replica runs it
  torch::nn::BatchNormOptions* options = nullptr;
  int answers = 0;  ///< of is_training(): the second is hidden

  static thread_local OneValueForward current;
};

/// Makes the layer with these tensors, one of which may be undefined, share its statistics.
void register_layer(const at::Tensor& running_mean, const at::Tensor& weight, ConvertedLayer layer);

void unregister_layer(const at::Tensor& running_mean, const at::Tensor& weight);

/// For tests: the number of registered tensors. A layer has one or two.
size_t registered_keys();

/// The group that a layer was converted with, in training or not; nullopt if it was not converted.
std::optional<ProcessGroupPtr> converted_group(const at::Tensor& running_mean,
                                               const at::Tensor& weight);

/// Makes libtorch's batch-norm layers below `module`, and itself, objects of ConvertibleBatchNorm
/// in place. Unconverted, they behave as before.
void make_convertible(torch::nn::Module& module);

/// Whether a converted layer in training computes its statistics with other ranks or replicas.
bool shares_statistics(const at::Tensor& running_mean, const at::Tensor& weight);

/// Once per process: overrides aten::batch_norm and defines the operators that replace
/// TorchScript's.
void install_operators();

/// Whether the parameter belongs to a replica of torch::nn::parallel::data_parallel.
bool is_replica(const at::Tensor& parameter);

/// @throws base::UserError saying that the layer runs as such a replica.
[[noreturn]] void throw_is_replica(const LayerName& layer);

/// Runs TorchScript. Rethrows the error of a layer, in place of which TorchScript's interpreter
/// throws std::runtime_error.
c10::IValue run_script(const std::function<c10::IValue()>& body);

}  // namespace syncbn::dist::detail

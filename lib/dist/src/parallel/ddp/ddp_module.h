#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include <syncbn/dist/ddp.h>

namespace syncbn::dist::detail {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// The SyncBatchNorm layers and the converted batch-norm layers of a module.
struct SyncLayers {
  std::vector<ProcessGroupPtr> groups;  ///< each once; null: the default group of such layers
  std::vector<at::Tensor> statistics;   ///< all running statistics

  void add(const ProcessGroupPtr& group, const std::vector<at::Tensor>& statistics_of_layer);
  bool empty() const { return groups.empty(); }
};

/// A module as DistributedDataParallel sees it. Each call lists the present tensors, in the order
/// of named_parameters() and named_buffers(); a tensor with two names once.
class WrappedModule {
 public:
  virtual ~WrappedModule() = default;
  virtual std::string class_name() const = 0;
  virtual std::vector<NamedTensor> parameters() const = 0;
  virtual std::vector<NamedTensor> buffers() const = 0;
  /// The parameters with sparse gradients: weights of embeddings with the option `sparse`.
  virtual std::unordered_set<const at::TensorImpl*> sparse_parameters() const = 0;
  virtual SyncLayers sync_layers() const = 0;
};

/// Each tensor of named_parameters() or named_buffers(), of libtorch or TorchScript, with its first
/// name.
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

}  // namespace syncbn::dist::detail

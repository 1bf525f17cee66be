#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include <syncbn/dist/ddp.h>

#include "batch_norm/named_layers.h"

namespace syncbn::dist::detail {

/// The SyncBatchNorm layers and the converted batch-norm layers of a module.
struct SyncLayers {
  std::vector<ProcessGroupPtr> groups;  ///< each once; null: the default group of such layers
  std::vector<at::Tensor> statistics;   ///< all running statistics

  void add(const ProcessGroupPtr& group, const std::vector<at::Tensor>& statistics_of_layer);
  bool empty() const { return groups.empty(); }
};

/// The interface that DistributedDataParallel needs of a module. Each call lists the current
/// tensors, in the order of named_parameters() and named_buffers(). A tensor with two names appears
/// once.
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

}  // namespace syncbn::dist::detail

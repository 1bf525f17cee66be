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

/// The SyncBatchNorm layers of a module, and its batch-norm layers that were converted.
struct SyncLayers {
  /// Each once; null: the default group of such layers.
  std::vector<ProcessGroupPtr> groups;
  /// All running statistics.
  std::vector<at::Tensor> statistics;

  void add(const ProcessGroupPtr& group, const std::vector<at::Tensor>& statistics_of_layer);
  bool empty() const { return groups.empty(); }
};

/// A module as DistributedDataParallel sees it. Lists are made anew by each call, in the order of
/// named_parameters() and named_buffers(); a tensor with two names is in them once.
class WrappedModule {
 public:
  virtual ~WrappedModule() = default;
  virtual std::string class_name() const = 0;
  virtual std::vector<NamedTensor> parameters() const = 0;
  virtual std::vector<NamedTensor> buffers() const = 0;
  /// The parameters whose gradients are sparse: those of embeddings that were made so.
  virtual std::unordered_set<const at::TensorImpl*> sparse_parameters() const = 0;
  virtual SyncLayers sync_layers() const = 0;
};

/// Keeps the first of each tensor's entries.
std::vector<NamedTensor> without_repetitions(std::vector<NamedTensor> all);

}  // namespace syncbn::dist::detail

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <syncbn/dist/ddp.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "batch_norm/join_statistics.h"
#include "ddp/ddp_module.h"

namespace syncbn::dist::detail {

struct JoinSpan {
  JoinOptions options;
  std::unique_ptr<JoinStatistics> statistics;  ///< null: no SyncBatchNorm layer exchanges
};

struct DdpState {
  std::shared_ptr<WrappedModule> module;
  DdpOptions options;
  ProcessGroupPtr group;
  std::vector<NamedTensor> parameters;  ///< those that require a gradient
  std::vector<NamedTensor> frozen;      ///< those that do not
  at::Device first_device = at::kCPU;   ///< of the first parameter
  std::optional<at::Device> input_device;
  std::unordered_set<std::string> ignored;
  std::shared_ptr<c10d::Reducer> reducer;
  /// The gradient accumulators of `parameters`, in the same order. The reducer owns them.
  std::vector<const torch::autograd::Node*> accumulators;
  std::shared_ptr<c10d::Logger> logger;
  int no_sync_guards = 0;
  /// False after a forward under no_sync: as in PyTorch, the next one does not broadcast buffers.
  bool sync_buffers_next = true;
  /// With a static graph, the first backward communicates only at its end.
  bool had_first_backward = false;
  bool has_comm_hook = false;
  /// Whether the hook has failed: the reducer would wait forever for that step. Any thread sets it.
  std::shared_ptr<std::atomic<bool>> comm_hook_failed = std::make_shared<std::atomic<bool>>(false);
  std::optional<JoinSpan> join;

  bool requires_sync() const { return no_sync_guards == 0; }
  bool searches_unused() const { return options.find_unused_parameters && !options.static_graph; }
  /// The buffers that broadcast_buffers applies to.
  std::vector<NamedTensor> shared_buffers() const;
  std::vector<at::Tensor> buffers_to_sync() const;
  /// Overwrites every rank's tensors with those of `rank`.
  void broadcast(const std::vector<at::Tensor>& tensors, int rank) const;
  /// Broadcasts the parameters and shared_buffers().
  void broadcast_module(int rank) const;
};

/// Compares the options, and the tensors' names, shapes and types, between all ranks. Does nothing
/// in a group with Python ranks, where libtorch compares the parameters.
/// @throws base::UserError naming two ranks that differ; base::UnavailableError if a peer fails.
void check_same_module(const DdpOptions& options, const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const ProcessGroupPtr& group);

/// @return the device for inputs; nullopt for a module on several devices.
/// @throws base::UserError for different types of device.
std::optional<at::Device> check_devices(const std::vector<at::Device>& devices);

/// @throws base::UserError if a parameter's accumulator has changed since the wrapping, because
///   module.to() has removed the reducer's hooks, or if a parameter that was frozen then requires a
///   gradient now.
void check_unchanged(const DdpState& state);

/// @throws base::UserError naming the parameters, if libtorch's message says that some got no
///   gradient in the previous step.
void explain_unfinished_reduction(const std::string& message,
                                  const std::vector<NamedTensor>& parameters);

// The steps of a rank with input in a join() span.

void notify_joined_ranks(DdpState& state);
/// The highest rank for which `yes` is true: it broadcasts its buffers. Collective.
int highest_rank(const DdpState& state, bool yes);
void announce_whether_gradients_follow(DdpState& state);

/// Whether the graph of any output contains one of the leaves.
bool reach_any(const std::vector<at::Tensor>& outputs,
               const std::vector<const torch::autograd::Node*>& leaves);

/// Copies of all outputs that share one autograd node. If the loss uses only some of them, backward
/// still runs the graphs of the others, with undefined gradients, so that the reducer does not wait
/// for their parameters. Backward calls `on_backward` when it reaches the node.
/// @param anchor a leaf that backward must reach, with an undefined gradient; may be undefined. If
///   no output requires a gradient, the copies do.
std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs, const at::Tensor& anchor,
                                     std::function<void()> on_backward);

}  // namespace syncbn::dist::detail

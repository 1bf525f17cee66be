#pragma once

#include <atomic>
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

/// A join() span that is open.
struct JoinSpan {
  JoinOptions options;
  /// When the module has SyncBatchNorm layers over several ranks.
  std::unique_ptr<JoinStatistics> statistics;
};

struct DdpState {
  std::shared_ptr<WrappedModule> module;
  DdpOptions options;
  ProcessGroupPtr group;
  /// Those that get gradients.
  std::vector<NamedTensor> parameters;
  /// Those that need none.
  std::vector<NamedTensor> frozen;
  at::Device first_device = at::kCPU;  ///< of the first parameter
  std::optional<at::Device> input_device;
  std::unordered_set<std::string> ignored;
  std::shared_ptr<c10d::Reducer> reducer;
  /// The graph's ends at the parameters; the reducer keeps them.
  std::vector<const torch::autograd::Node*> accumulators;
  std::shared_ptr<c10d::Logger> logger;
  int no_sync_guards = 0;
  /// False after a forward under no_sync: the buffers then stay as they are, as in PyTorch.
  bool sync_buffers_next = true;
  /// Of a static graph: all communication comes at the end of the first backward.
  bool had_first_backward = false;
  bool has_comm_hook = false;
  /// After that, c10d's engine has a step that never ends. Written by any thread.
  std::shared_ptr<std::atomic<bool>> comm_hook_failed = std::make_shared<std::atomic<bool>>(false);
  std::optional<JoinSpan> join;

  bool requires_sync() const { return no_sync_guards == 0; }
  bool searches_unused() const { return options.find_unused_parameters && !options.static_graph; }
  /// The buffers that broadcast_buffers makes the same.
  std::vector<NamedTensor> shared_buffers() const;
  /// Those of them that are made the same before this forward.
  std::vector<at::Tensor> buffers_to_sync() const;
  /// Overwrites every rank's tensors by those of `rank`.
  void broadcast(const std::vector<at::Tensor>& tensors, int rank) const;
  /// Parameters, and buffers where they are to be the same.
  void broadcast_module(int rank) const;
};

// What a rank with input does in each step of a join() span.

void notify_joined_ranks(DdpState& state);
/// The rank whose buffers count.
int rank_with_buffers(DdpState& state);
void tell_whether_gradients_follow(DdpState& state);

}  // namespace syncbn::dist::detail

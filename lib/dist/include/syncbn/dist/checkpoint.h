#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::dist {

/// Options of checkpoint(), with the names and defaults of torch.utils.checkpoint.checkpoint.
struct CheckpointOptions {
  /// Recompute with the same random numbers, so that dropout drops the same elements.
  bool preserve_rng_state = true;
};

/// Runs `function` on `inputs` without keeping its activations; backward computes them again (Chen
/// et al., arXiv:1604.06174; twin of torch.utils.checkpoint.checkpoint with use_reentrant=True).
///
///     x = checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
///
/// The recomputation uses the statistics that SyncBatchNorm and converted layers exchanged the
/// first time: it exchanges nothing and does not update running statistics again. (libtorch's own
/// layers update theirs twice, as in PyTorch.) It runs with the autocast state of the first run.
/// Calls may nest.
///
/// `function` must do the same both times, and its captures must outlive backward. If no input
/// requires a gradient, it runs as without checkpoint() and keeps its activations, so that
/// parameters inside get their gradients, unlike in PyTorch. Inside DistributedDataParallel, use
/// each parameter once or set static_graph.
///
/// @throws base::UserError (backward) for selected inputs only (torch::autograd::grad), with
///   create_graph=true, or when the recomputation returns another number of outputs or runs more
///   SyncBatchNorm or converted layers.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});

/// checkpoint() for one input and one output.
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options = {});

}  // namespace syncbn::dist

#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::dist {

/// Options of checkpoint(); the same names and defaults as torch.utils.checkpoint.checkpoint.
struct CheckpointOptions {
  /// Run the recomputation from the random numbers that the first forward began with, so that
  /// dropout drops the same.
  bool preserve_rng_state = true;
};

/// Runs `function` on `inputs` without keeping what its backward needs; backward runs it again
/// (Chen et al., arXiv:1604.06174; twin of torch.utils.checkpoint.checkpoint with
/// use_reentrant=True).
///
///     x = checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
///
/// SyncBatchNorm layers inside, and converted ones, normalise the second time by the statistics
/// that the first forward exchanged: running statistics are updated once, and nothing more is
/// exchanged. (Layers of libtorch's own that are not converted update theirs twice, as in PyTorch.)
/// Autocast is as it was. Calls may nest.
///
/// `function` does the same both times, and what it captures outlives backward. At least one input
/// requires a gradient, or nothing inside gets one. Inside DistributedDataParallel each parameter
/// is used once, or static_graph is set.
///
/// @throws base::UserError (backward) when it runs for chosen inputs only (torch::autograd::grad),
///   with create_graph=true, or when the recomputation has other outputs or more layers.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});

/// The same for one input and one output.
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options = {});

}  // namespace syncbn::dist

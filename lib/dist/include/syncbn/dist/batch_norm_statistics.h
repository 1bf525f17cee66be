#pragma once

#include <cstdint>
#include <functional>

#include <torch/nn/module.h>

#include <syncbn/dist/process_group.h>

namespace torch::jit {
struct Module;
}

namespace syncbn::dist {

/// Makes running_mean and running_var of all batch-norm layers equal on all ranks, in one
/// collective: for layers that are not synchronised, at the end of an epoch, before evaluation.
/// Like timm's function, it takes all buffers with these names. Every rank of the group calls it.
///
/// @param reduce true: the mean over ranks; false: rank 0's. The mean of the variances ignores the
///   differences between the ranks' means.
/// @throws base::UserError when the ranks' buffers differ; base::UnavailableError when a peer
///   fails.
void distribute_bn(torch::nn::Module& module, bool reduce = false,
                   const GroupOrDefault& group = {});
void distribute_bn(torch::jit::Module& module, bool reduce = false,
                   const GroupOrDefault& group = {});

/// Replaces the running statistics of all batch-norm layers below `module`, and of `module` itself,
/// with the exact mean and unbiased variance over `num_iters` batches, because running averages lag
/// behind the weights (Wu and Johnson, arXiv:2105.07576; like fvcore's function of that name, but
/// each batch is weighted by its number of values).
///
///     update_bn_stats(*net, [&](int64_t i) { net->forward(batches[i]); }, batches.size());
///
/// Skips layers in evaluation mode and those without running statistics. Synchronised layers use
/// the batches of all their ranks, others only this rank's (see distribute_bn()).
/// num_batches_tracked does not change.
///
/// @param forward runs the module on batch i; it is called without gradients
/// @throws what `forward` throws, and restores the statistics; base::UserError when `num_iters` is
///   below 1, or all batches together have fewer than two values per channel.
void update_bn_stats(torch::nn::Module& module, const std::function<void(int64_t i)>& forward,
                     int64_t num_iters = 200);

}  // namespace syncbn::dist

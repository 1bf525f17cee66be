#pragma once

#include <cstdint>
#include <functional>

// torch::nn::Module.
#include <torch/nn/module.h>

#include <syncbn/dist/process_group.h>

namespace torch::jit {
struct Module;
}

namespace syncbn::dist {

/// Makes running_mean and running_var of all batch-norm layers equal on all ranks, in one
/// collective: for layers that are not synchronised, at the end of an epoch, before evaluation.
/// The same as timm's function of that name: all buffers of these two names are taken.
///
/// @param reduce true: their mean over ranks; false: rank 0's. (The mean of variances leaves out
/// how
///   far the ranks' means are apart.)
/// @throws base::UserError when ranks have different buffers; base::UnavailableError when a peer
///   fails. Every rank of the group calls it.
void distribute_bn(torch::nn::Module& module, bool reduce = false,
                   const ProcessGroupPtr& group = {});
void distribute_bn(torch::jit::Module& module, bool reduce = false,
                   const ProcessGroupPtr& group = {});

/// Replaces the running statistics of all batch-norm layers below `module`, and of `module` itself,
/// by the exact mean and unbiased variance over `num_iters` batches: averages over a training lag
/// behind its weights (Wu and Johnson, arXiv:2105.07576; like fvcore's function of that name, but
/// batches weigh as many values as they have).
///
///     update_bn_stats(*net, [&](int64_t i) { net->forward(batches[i]); }, batches.size());
///
/// Layers have to be in training mode; those in evaluation mode and those without running
/// statistics are left alone. Layers that are synchronised take the batches of all their ranks,
/// others this rank's (see distribute_bn()). Nothing else changes: no gradient is recorded and
/// num_batches_tracked stays.
///
/// @param forward runs the module on batch i; it is called without gradients.
/// @throws what `forward` throws, with the statistics as they were; base::UserError when
///   `num_iters` is below 1, or the batches together have fewer than two values per channel.
void update_bn_stats(torch::nn::Module& module, const std::function<void(int64_t i)>& forward,
                     int64_t num_iters = 200);

}  // namespace syncbn::dist

// Runs two steps of a network with batch normalisation on ranks with different data, and records
// running_mean along the way. buffer_broadcast.cpp prints it; docs/buffers.md explains the numbers.
#pragma once

#include <numeric>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

namespace buffer_broadcast {

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& images) {
    // DistributedDataParallel has broadcast the buffers just before this line.
    seen.push_back(batch_norm->running_mean.clone());
    const at::Tensor features = conv(images);
    batch_mean = features.detach().mean({0, 2, 3});
    return batch_norm(features).sum();
  }

  torch::nn::Conv2d conv =
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)));
  torch::nn::BatchNorm2d batch_norm = register_module("batch_norm", torch::nn::BatchNorm2d(5));
  std::vector<at::Tensor> seen;  // running_mean at the start of each forward
  at::Tensor batch_mean;         // of this rank's batch, per channel
};
TORCH_MODULE(Net);

/// Zeros on even ranks, ones on odd ranks.
inline at::Tensor images() {
  return at::full({7, 3, 5, 5}, static_cast<double>(syncbn::dist::rank() % 2));
}

enum class BatchNorm { kLocal, kSynchronised };

inline Net make_net(BatchNorm kind) {
  at::manual_seed(0);
  Net net;
  if (kind == BatchNorm::kSynchronised) {
    std::vector<int> all(static_cast<size_t>(syncbn::dist::world_size()));
    std::iota(all.begin(), all.end(), 0);
    syncbn::dist::convert_sync_batchnorm(*net, syncbn::dist::new_group(all));
  }
  return net;
}

/// This rank's running_mean at five moments, per channel.
struct Moments {
  at::Tensor batch_mean;  // of the first batch
  at::Tensor inside_first, after_first, after_backward, inside_second, after_second;
};

inline Moments run(BatchNorm kind, bool broadcast_buffers) {
  const Net net = make_net(kind);
  syncbn::dist::DistributedDataParallel<NetImpl> ddp(net, {.broadcast_buffers = broadcast_buffers});
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-3));
  const at::Tensor& running_mean = net->batch_norm->running_mean;
  Moments moments;

  const at::Tensor loss = ddp(images()).square().mean();
  moments.batch_mean = net->batch_mean;
  moments.after_first = running_mean.clone();
  loss.backward();
  moments.after_backward = running_mean.clone();
  optimizer.step();
  ddp(images());
  moments.after_second = running_mean.clone();
  moments.inside_first = net->seen[0];
  moments.inside_second = net->seen[1];
  return moments;
}

/// The gradient of batch normalisation's bias. With `unused_forward`, a second forward overwrites
/// the buffers before the first one's backward: PyTorch 2.11 fails there with "modified by an
/// inplace operation".
inline at::Tensor gradient(bool unused_forward) {
  const Net net = make_net(BatchNorm::kLocal);
  syncbn::dist::DistributedDataParallel<NetImpl> ddp(net);
  const at::Tensor loss = ddp(images()).square().mean();
  if (unused_forward) ddp(images());
  loss.backward();
  return net->batch_norm->bias.grad();
}

}  // namespace buffer_broadcast

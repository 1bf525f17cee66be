// PyTorch's check of DistributedDataParallel: trains five steps on shards, with scaled losses, and
// one model on the whole batch; compares parameters, and here also buffers, after each step.
#pragma once

#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <numeric>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "dist/tensors.h"
#include "dist/training.h"

namespace syncbn::test {

// The tolerances of PyTorch's own tests of DDP.
inline constexpr double kRtol = 1.3e-6;
inline constexpr double kAtol = 1e-5;

/// What a network has besides its three linear layers.
enum class Network {
  kPlain,
  kBatchNorm,
  kSyncBatchNorm,
  kSeveralOutputs,
  kUnusedLayer,  ///< a layer that no rank uses
  kBranches,     ///< two layers, one for even and one for odd ranks
};

struct ShardedNetImpl : torch::nn::Module {
  explicit ShardedNetImpl(Network kind) : kind(kind) {
    namespace nn = torch::nn;
    first = register_module("first", nn::Linear(2, 10));
    if (kind == Network::kBatchNorm) {
      batch_norm = register_module("batch_norm", nn::BatchNorm1d(10));
    }
    if (kind == Network::kSyncBatchNorm) {
      sync_batch_norm = register_module("sync_batch_norm", dist::SyncBatchNorm(10));
    }
    second = register_module("second", nn::Linear(10, 50));
    third = register_module("third", nn::Linear(50, 4));
    if (kind == Network::kPlain) return;
    left = register_module("left", nn::Linear(50, 4));
    right = register_module("right", nn::Linear(50, 4));
  }

  /// @param rank the rank to which the samples belong
  std::vector<at::Tensor> forward(const at::Tensor& input, int rank) {
    at::Tensor x = first(input);
    if (batch_norm) x = batch_norm(x);
    if (sync_batch_norm) x = sync_batch_norm(x);
    x = at::relu(second(at::relu(x)));
    switch (kind) {
      case Network::kBranches:
        return {third(x) + (rank % 2 == 0 ? left(x) : right(x))};
      case Network::kUnusedLayer:
        return {third(x) + left(x)};
      case Network::kPlain:
        return {third(x).softmax(1)};
      default:
        return {third(x).softmax(1), left(x), right(x)};
    }
  }

  Network kind;
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, left{nullptr}, right{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  dist::SyncBatchNorm sync_batch_norm{nullptr};
};
TORCH_MODULE(ShardedNet);

using Tensors = std::vector<at::Tensor>;

/// A batch over all ranks.
struct WholeBatch {
  at::Tensor input;
  Tensors targets;              ///< as many as a network may have outputs
  std::vector<int64_t> shares;  ///< number of samples of each rank

  WholeBatch(std::vector<int64_t> samples, int step) : shares(std::move(samples)) {
    at::manual_seed(static_cast<uint64_t>(1337 + step));
    input = at::randn({size(), 2});
    for (int i = 0; i < 3; ++i) targets.push_back(at::randn({size(), 4}));
  }

  int64_t size() const { return std::accumulate(shares.begin(), shares.end(), int64_t{0}); }
  double weight(size_t rank) const {
    return static_cast<double>(shares[rank]) / static_cast<double>(size());
  }
  at::Tensor shard(const at::Tensor& whole, size_t rank) const {
    const auto own = shares.begin() + static_cast<std::ptrdiff_t>(rank);
    return whole.narrow(0, std::accumulate(shares.begin(), own, int64_t{0}), *own);
  }
  at::Tensor loss(const Tensors& outputs, const Tensors& wanted) const {
    at::Tensor loss = at::zeros({});
    for (size_t i = 0; i < outputs.size(); ++i) {
      loss = loss + (outputs[i] - wanted[i]).pow(2).mean();
    }
    return loss;
  }
  at::Tensor loss_of_shard(const Tensors& outputs, size_t rank) const {
    Tensors wanted;
    for (const at::Tensor& target : targets) wanted.push_back(shard(target, rank));
    return loss(outputs, wanted);
  }
};

/// The model on the whole batch.
class WholeBatchReference {
 public:
  /// @param broadcast_buffers whether all ranks continue with rank 0's running statistics
  /// @param alone a group that contains only this rank
  WholeBatchReference(Network kind, size_t ranks, bool broadcast_buffers,
                      const dist::ProcessGroupPtr& alone)
      : net_(kind),
        broadcast_buffers_(broadcast_buffers),
        buffers_(ranks, cloned(net_->buffers())) {
    if (kind == Network::kSyncBatchNorm) net_->sync_batch_norm->options.process_group(alone);
  }

  ShardedNetImpl& net() { return *net_; }

  void backward(const WholeBatch& batch) {
    if (net_->kind == Network::kBatchNorm || net_->kind == Network::kBranches) {
      backward_by_shards(batch);
      return;
    }
    batch.loss(net_->forward(batch.input, 0), batch.targets).backward();
    buffers_.assign(buffers_.size(), cloned(net_->buffers()));
  }

  /// The buffers of a rank after the step.
  const Tensors& buffers_of(size_t rank) const { return buffers_[rank]; }

 private:
  static Tensors cloned(Tensors tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.clone();
    return tensors;
  }

  // Runs each rank's samples as that rank does: with its own statistics, or its own branch.
  void backward_by_shards(const WholeBatch& batch) {
    const Tensors of_first = buffers_[0];
    for (size_t rank = 0; rank < buffers_.size(); ++rank) {
      const Tensors& before = broadcast_buffers_ ? of_first : buffers_[rank];
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < before.size(); ++i) net_->buffers()[i].copy_(before[i]);
      }
      const auto outputs = net_->forward(batch.shard(batch.input, rank), static_cast<int>(rank));
      (batch.loss_of_shard(outputs, rank) * batch.weight(rank)).backward();
      buffers_[rank] = cloned(net_->buffers());
    }
  }

  ShardedNet net_;
  bool broadcast_buffers_;
  std::vector<Tensors> buffers_;
};

inline void expect_close(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(close(actual[i], expected[i], kRtol, kAtol)) << "tensor " << i;
  }
}

/// Call this on every rank; `shares` are the numbers of samples of the ranks.
inline void expect_trains_as_whole_batch(Network kind, const dist::DdpOptions& options,
                                         const std::vector<int64_t>& shares,
                                         const dist::ProcessGroupPtr& alone) {
  const auto rank = static_cast<size_t>(dist::rank());
  // Different weights on each rank if DDP has to take rank 0's.
  at::manual_seed(options.init_sync ? 100 + rank : 100);
  ShardedNet net(kind);
  at::manual_seed(100);
  WholeBatchReference whole(kind, shares.size(), options.broadcast_buffers, alone);
  dist::DistributedDataParallel<ShardedNetImpl> ddp(net, options);
  expect_close(net->parameters(), whole.net().parameters());
  for (int step = 0; step < 5; ++step) {
    SCOPED_TRACE(step);
    const WholeBatch batch(shares, step);
    // DDP averages over ranks; the weight turns that into a mean over samples.
    const double weight = batch.weight(rank) * static_cast<double>(shares.size());
    const auto outputs = ddp(batch.shard(batch.input, rank), dist::rank());
    (batch.loss_of_shard(outputs, rank) * weight).backward();
    whole.backward(batch);
    sgd_step(*net);
    sgd_step(whole.net());
    expect_close(net->parameters(), whole.net().parameters());
    expect_close(net->buffers(), whole.buffers_of(rank));
  }
}

/// Three steps of three batches each, in which DDP averages with the last batch, of a network with
/// SyncBatchNorm. Call this on every rank; `shares` are the numbers of samples of the ranks in
/// every batch.
inline void expect_accumulates_as_whole_batch(const dist::DdpOptions& options,
                                              const std::vector<int64_t>& shares,
                                              const dist::ProcessGroupPtr& alone) {
  const auto rank = static_cast<size_t>(dist::rank());
  at::manual_seed(100);
  ShardedNet net(Network::kSyncBatchNorm);
  at::manual_seed(100);
  WholeBatchReference whole(Network::kSyncBatchNorm, shares.size(), options.broadcast_buffers,
                            alone);
  dist::DistributedDataParallel<ShardedNetImpl> ddp(net, options);
  const auto backward = [&](const WholeBatch& batch) {
    const double weight = batch.weight(rank) * static_cast<double>(shares.size());
    const auto outputs = ddp(batch.shard(batch.input, rank), dist::rank());
    (batch.loss_of_shard(outputs, rank) * weight).backward();
    whole.backward(batch);
  };
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    {
      const auto guard = ddp.no_sync();
      for (int i = 0; i < 2; ++i) backward(WholeBatch(shares, 3 * step + i));
    }
    backward(WholeBatch(shares, 3 * step + 2));
    sgd_step(*net);
    sgd_step(whole.net());
    expect_close(net->parameters(), whole.net().parameters());
    expect_close(net->buffers(), whole.buffers_of(rank));
  }
}

}  // namespace syncbn::test

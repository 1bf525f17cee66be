#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/ivalue.h>

#include <syncbn/dist/process_group.h>

namespace c10d {
class GradBucket;  // to write a hook, include <torch/csrc/distributed/c10d/comm.hpp>
}

namespace syncbn::dist {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// Averages the gradients of one bucket of DistributedDataParallel. Called once per step and
/// bucket, in backward, when the bucket's gradients are complete, in the same order on all ranks.
/// The future's value replaces the bucket's content: a tensor of the same shape, already averaged.
/// Twin of PyTorch's DDP communication hooks.
///
/// Runs on the thread of backward; callbacks of a future may run on a thread of the group.
using CommHook = std::function<FuturePtr(c10d::GradBucket& bucket)>;

// {} is the default group.

/// The default: the mean, by one all-reduce.
CommHook allreduce_hook(const GroupOrDefault& group = {});

/// allreduce_hook in float16: half the bytes; gradients beyond 65504 overflow.
CommHook fp16_compress_hook(const GroupOrDefault& group = {});

/// allreduce_hook in bfloat16: half the bytes, the range of float32, 8 bits of precision.
CommHook bf16_compress_hook(const GroupOrDefault& group = {});

/// Runs `hook` on the bucket cast to float16 or bfloat16, and casts its result back.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

/// Options of power_sgd_hook, with the names and defaults of PyTorch's PowerSGDState.
struct PowerSgdOptions {
  GroupOrDefault process_group = {};
  /// Rank of the matrices that approximate a gradient: 1, 2, 4 … Higher is more exact and sends
  /// more.
  int64_t matrix_approximation_rank = 1;
  /// Number of first steps with plain all-reduce, because gradients change most in these.
  int64_t start_power_sgd_iter = 1000;
  /// Gradients that would not shrink by more than this factor are sent uncompressed.
  double min_compression_rate = 2;
  /// Add the error of the compression to the next step's gradient.
  bool use_error_feedback = true;
  /// Start each step from the factors of the previous one.
  bool warm_start = true;
  /// Added to the norm of each column in orthogonalisation; set it if gradients may be all zero.
  double orthogonalization_epsilon = 0;
  /// Seed of the first factors; must be the same on all ranks.
  uint32_t random_seed = 0;
  /// Compress gradients of one shape in one operation.
  bool batch_tensors_with_same_shape = false;
};

/// Low-rank compression of the gradients (Vogels, Karimireddy and Jaggi, arXiv:1905.13727): sends
/// P = M Q and Q = Mᵀ P in place of each matrix M. The hook keeps state from step to step: make one
/// for each DistributedDataParallel. It blocks the thread of backward, which keeps the order of
/// collectives the same on all ranks. Not for groups with Python ranks.
/// @throws base::UserError for a rank below 1, and when error feedback or warm start would begin
///   before step 2, because DDP rebuilds its buckets after the first step.
CommHook power_sgd_hook(const PowerSgdOptions& options = {});

}  // namespace syncbn::dist

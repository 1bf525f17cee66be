#pragma once

#include <cstdint>
#include <functional>

// c10::ivalue::Future.
#include <ATen/core/ivalue.h>

#include <syncbn/dist/process_group.h>

namespace c10d {
class GradBucket;  // to write a hook, include <torch/csrc/distributed/c10d/comm.hpp>
}

namespace syncbn::dist {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// How DistributedDataParallel brings the gradients of one bucket together: called once a step and
/// bucket, during backward, as soon as the bucket's gradients are there, and on all ranks in the
/// same order. The future's value is the tensor that replaces the bucket's content, of the same
/// shape, already averaged. Twin of PyTorch's DDP communication hooks.
///
/// Runs on the thread of backward; what it chains to a future may run on a thread of the group's.
using CommHook = std::function<FuturePtr(c10d::GradBucket& bucket)>;

// An empty group means the default one.

/// The mean by one all-reduce: what happens without a hook.
CommHook allreduce_hook(ProcessGroupPtr group = {});

/// The same in float16: half the bytes, gradients beyond 65504 overflow.
CommHook fp16_compress_hook(ProcessGroupPtr group = {});

/// The same in bfloat16: half the bytes, the range of float32, 8 bits of precision.
CommHook bf16_compress_hook(ProcessGroupPtr group = {});

/// Runs `hook` on the bucket cast to float16 or bfloat16, and casts its result back.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

/// Options of power_sgd_hook; names and defaults of PyTorch's PowerSGDState.
struct PowerSgdOptions {
  /// Empty: the default group.
  ProcessGroupPtr process_group = {};
  /// Rank of the matrices that stand for a gradient: 1, 2, 4 … More is more exact, and more bytes.
  int64_t matrix_approximation_rank = 1;
  /// Steps with plain all-reduce at the beginning, when gradients change most.
  int64_t start_power_sgd_iter = 1000;
  /// Gradients that would not shrink by more than this are sent as they are.
  double min_compression_rate = 2;
  /// Add what compression left out to the next step's gradient.
  bool use_error_feedback = true;
  /// Begin each step with the factors of the one before.
  bool warm_start = true;
  /// Added to the norm of each column when factors are orthogonalised; above 0 where gradients may
  /// be all zero.
  double orthogonalization_epsilon = 0;
  /// Of the first factors; the same on all ranks.
  uint32_t random_seed = 0;
  /// Compress gradients of one shape in one operation.
  bool batch_tensors_with_same_shape = false;
};

/// Low-rank compression of the gradients (Vogels, Karimireddy and Jaggi, arXiv:1905.13727): of each
/// matrix M only P = M Q and Q = Mᵀ P travel. The hook keeps memory of former steps: make one for
/// each DistributedDataParallel. Communicates on the thread of backward, which waits: the order of
/// collectives is then the same on all ranks. Not with ranks of Python's.
/// @throws base::UserError for a rank below 1, and when error feedback or warm start shall begin
///   before step 2, since DDP arranges its buckets anew after the first.
CommHook power_sgd_hook(const PowerSgdOptions& options = {});

}  // namespace syncbn::dist

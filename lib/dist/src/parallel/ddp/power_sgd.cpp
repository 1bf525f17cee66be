#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/comm_hooks.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <random>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "ddp/comm_hook_steps.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace {

using c10::ivalue::Future;

FuturePtr done(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<Future>(c10::TensorType::get(), std::move(devices));
  future->markCompleted(value);
  return future;
}

/// Makes the columns of [batch, n, r] orthonormal, in place: modified Gram-Schmidt.
void gram_schmidt(at::Tensor& matrices, double epsilon) {
  const int64_t columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
    if (epsilon != 0) norm = norm + epsilon;
    column.div_(norm);
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(at::IntArrayRef{1}, /*keepdim=*/true) * column);
  }
}

void orthogonalize(at::Tensor& matrices, double epsilon) {
  const bool is_half =
      matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  constexpr int64_t kMaxGramSchmidtColumns = 2;  // with more columns QR is faster
  if (matrices.size(2) <= kMaxGramSchmidtColumns || is_half) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

/// numpy.random.RandomState(seed).randint(1_000_000_000), which seeds the factors of PyTorch's
/// PowerSGD: a seed gives the same training in both.
uint64_t next_seed(std::mt19937& engine) {
  constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;
  for (;;) {
    const uint32_t drawn = static_cast<uint32_t>(engine()) & kMask;
    if (drawn < 1'000'000'000) return drawn;
  }
}

class PowerSgd {
 public:
  explicit PowerSgd(const PowerSgdOptions& options)
      : options_(options), seeds_(static_cast<uint32_t>(options.random_seed)) {}

  FuturePtr run(c10d::GradBucket& bucket) {
    if (!group_) {
      group_ = options_.process_group.get();
      if (!detail::all_ranks_are_ours(group_)) {
        throw base::UserError(
            "power_sgd_hook: a rank of the group runs Python, whose PowerSGD sends its all-reduces "
            "in another order; use it in groups of C++ ranks only");
      }
    }
    const bool plain = step_ < options_.start_power_sgd_iter;
    if (bucket.isLast()) ++step_;
    if (plain) return detail::mean_of(bucket.getBuffer(), group_);
    compress(bucket);
    return done(bucket.getBuffer());
  }

 private:
  /// The state of a bucket between steps.
  struct Memory {
    int64_t size = 0;
    at::Tensor error;  ///< the gradient minus its approximation
    at::Tensor p, q;   ///< the factors of all batches, flattened
  };

  /// Matrices of one shape (or one matrix), and their factors.
  struct Batch {
    explicit Batch(at::Tensor matrix) : matrices{std::move(matrix)} {}
    std::vector<at::Tensor> matrices;  ///< views of the bucket
    at::Tensor stacked;
    at::Tensor p;  ///< [batch, n, r]
    at::Tensor q;  ///< [batch, m, r]
  };

  int64_t rank_for(const at::Tensor& matrix) const {
    return std::min({matrix.size(0), matrix.size(1), options_.matrix_approximation_rank});
  }

  void sum_over_ranks(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    detail::start_all_reduce(tensor, group_)->wait();
  }

  // Starts all collectives of a bucket on the thread of backward. If continuations started them,
  // the collectives of two buckets could run in a different order on each rank.
  void compress(c10d::GradBucket& bucket) {
    const at::Tensor buffer = bucket.getBuffer();
    Memory& memory = memory_[bucket.getIndex()];
    check_size(memory, buffer);
    at::Tensor before;
    if (options_.use_error_feedback) {
      if (memory.error.defined()) buffer.add_(memory.error);
      before = buffer.clone();
    }
    std::vector<at::Tensor> whole;
    std::vector<Batch> batches = make_batches(bucket, whole);
    attach_factors(batches, memory, buffer.options());
    for (Batch& batch : batches) at::bmm_out(batch.p, batch.stacked, batch.q);

    send_whole(whole);
    sum_over_ranks(memory.p);  // no need to divide before orthogonalising
    for (Batch& batch : batches) {
      orthogonalize(batch.p, options_.orthogonalization_epsilon);
      at::bmm_out(batch.q, batch.stacked.transpose(1, 2), batch.p);
    }
    sum_over_ranks(memory.q);
    memory.q.div_(group_->getSize());
    for (Batch& batch : batches) {
      at::bmm_out(batch.stacked, batch.p, batch.q.transpose(1, 2));
      if (batch.matrices.size() == 1) continue;
      for (size_t i = 0; i < batch.matrices.size(); ++i) {
        batch.matrices[i].copy_(batch.stacked[static_cast<int64_t>(i)]);
      }
    }
    if (options_.use_error_feedback) memory.error = before - buffer;
    if (!options_.warm_start) memory.p = memory.q = at::Tensor();
  }

  /// Refuses a change of size: a wrapper's buckets keep theirs after the first step.
  static void check_size(Memory& memory, const at::Tensor& buffer) {
    if (!memory.error.defined() && !memory.q.defined()) memory.size = buffer.numel();
    if (memory.size == buffer.numel()) return;
    throw base::UserError(
        fmt::format("power_sgd_hook: a bucket has {} and had {} before; each "
                    "DistributedDataParallel needs a hook of its own",
                    base::counted(buffer.numel(), "value"), memory.size));
  }

  /// @param whole receives the gradients that are not worth compressing.
  std::vector<Batch> make_batches(const c10d::GradBucket& bucket, std::vector<at::Tensor>& whole) {
    std::vector<Batch> batches;
    for (const at::Tensor& gradient : bucket.getGradients()) {
      const at::Tensor matrix =
          gradient.dim() == 0 ? gradient.view({1, 1}) : gradient.view({gradient.size(0), -1});
      const auto size = static_cast<double>((matrix.size(0) + matrix.size(1)) * rank_for(matrix));
      const bool shrinks =
          size * options_.min_compression_rate < static_cast<double>(matrix.numel());
      if (!shrinks) {
        whole.push_back(gradient);
        continue;
      }
      const auto same = std::find_if(batches.begin(), batches.end(), [&](const Batch& batch) {
        return batch.matrices[0].sizes() == matrix.sizes();
      });
      if (same == batches.end()) {
        batches.emplace_back(matrix);
      } else if (options_.batch_tensors_with_same_shape) {
        same->matrices.push_back(matrix);
      } else {
        // Insert it after the others of its shape, as in PyTorch's order of factors.
        const auto behind = std::find_if(same, batches.end(), [&](const Batch& batch) {
          return batch.matrices[0].sizes() != matrix.sizes();
        });
        batches.emplace(behind, matrix);
      }
    }
    for (Batch& batch : batches) {
      batch.stacked =
          batch.matrices.size() == 1 ? batch.matrices[0].unsqueeze(0) : at::stack(batch.matrices);
    }
    return batches;
  }

  /// Makes the factors of all batches views of one tensor, for a single all-reduce.
  void attach_factors(std::vector<Batch>& batches, Memory& memory,
                      const at::TensorOptions& options) {
    const bool fresh = !memory.q.defined();
    // Dimension 1 of the stacked matrices for P, 2 for Q.
    const auto attach = [&](at::Tensor& flat, int64_t dimension, at::Tensor Batch::*factor) {
      const auto sizes = [&](const Batch& batch) {
        return std::array{batch.stacked.size(0), batch.stacked.size(dimension),
                          rank_for(batch.matrices[0])};
      };
      int64_t total = 0;
      for (const Batch& batch : batches) total += c10::multiply_integers(sizes(batch));
      if (fresh) flat = at::empty({total}, options);
      int64_t begin = 0;
      for (Batch& batch : batches) {
        const int64_t length = c10::multiply_integers(sizes(batch));
        batch.*factor = flat.narrow(0, begin, length).view(sizes(batch));
        begin += length;
      }
    };
    attach(memory.p, 1, &Batch::p);
    attach(memory.q, 2, &Batch::q);
    // A generator that is equal on all ranks and leaves the program's own random numbers alone.
    at::Generator generator;
    if (fresh) generator = at::detail::createCPUGenerator(next_seed(seeds_));
    for (Batch& batch : batches) {
      const auto on_cpu = batch.q.options().device(at::kCPU);
      if (fresh) batch.q.copy_(at::randn(batch.q.sizes(), generator, on_cpu));
      orthogonalize(batch.q, options_.orthogonalization_epsilon);
    }
  }

  void send_whole(const std::vector<at::Tensor>& gradients) {
    if (gradients.empty()) return;
    const at::Tensor all = at::flatten_dense_tensors(gradients);
    sum_over_ranks(all);
    all.div_(group_->getSize());
    int64_t begin = 0;
    for (const at::Tensor& gradient : gradients) {
      gradient.copy_(all.narrow(0, begin, gradient.numel()).view_as(gradient));
      begin += gradient.numel();
    }
  }

  const PowerSgdOptions options_;
  std::mt19937 seeds_;
  ProcessGroupPtr group_;
  int64_t step_ = 0;
  std::map<size_t, Memory> memory_;  ///< by bucket index
};

}  // namespace

CommHook power_sgd_hook(const PowerSgdOptions& options) {
  if (options.matrix_approximation_rank < 1) {
    throw base::UserError(
        fmt::format("power_sgd_hook: matrix_approximation_rank must be 1 or more, got {}",
                    options.matrix_approximation_rank));
  }
  if ((options.use_error_feedback || options.warm_start) && options.start_power_sgd_iter < 2) {
    throw base::UserError(fmt::format(
        "power_sgd_hook: start_power_sgd_iter must be 2 or more with error feedback or warm start, "
        "got {}: DDP rebuilds its buckets after the first step",
        options.start_power_sgd_iter));
  }
  return [state = std::make_shared<PowerSgd>(options)](c10d::GradBucket& bucket) {
    return state->run(bucket);
  };
}

}  // namespace syncbn::dist

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/comm_hooks.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <ATen/CPUGeneratorImpl.h>

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
  constexpr int64_t kFewColumns = 2;  // where QR costs more
  if (matrices.size(2) <= kFewColumns || is_half) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

/// The numbers of numpy.random.RandomState(seed).randint(1_000_000_000), which PyTorch's PowerSGD
/// seeds its factors with: the same seed gives the same training here and there.
class SeedSequence {
 public:
  explicit SeedSequence(uint32_t seed) : engine_(seed) {}

  uint64_t next() {
    constexpr uint32_t kLargest = 1'000'000'000 - 1;
    constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;
    for (;;) {
      const uint32_t drawn = static_cast<uint32_t>(engine_()) & kMask;
      if (drawn <= kLargest) return drawn;
    }
  }

 private:
  std::mt19937 engine_;
};

class PowerSgd {
 public:
  explicit PowerSgd(const PowerSgdOptions& options)
      : options_(options), seeds_(options.random_seed) {}

  FuturePtr run(c10d::GradBucket& bucket) {
    if (!group_) {
      group_ = options_.process_group ? options_.process_group : default_group();
      if (!detail::all_ranks_are_ours(group_)) {
        throw base::UserError(
            "power_sgd_hook: a rank of the group runs Python, whose PowerSGD sends its all-reduces "
            "in another order; use it among C++ ranks alone");
      }
    }
    const bool plain = step_ < options_.start_power_sgd_iter;
    if (bucket.isLast()) ++step_;
    if (plain) return detail::mean_of(bucket.getBuffer(), group_);
    compress(bucket);
    return done(bucket.getBuffer());
  }

 private:
  /// What is kept of a bucket between steps.
  struct Memory {
    int64_t size = 0;
    at::Tensor error;  ///< what compression left out
    at::Tensor p;      ///< all P of the bucket, flat
    at::Tensor q;
  };

  /// The matrices of one shape (or one matrix), [batch, n, m], and their factors.
  struct Batch {
    explicit Batch(at::Tensor matrix) : matrices{std::move(matrix)} {}
    std::vector<at::Tensor> matrices;  ///< of the bucket
    at::Tensor stacked;
    at::Tensor p;  ///< [batch, n, r]
    at::Tensor q;  ///< [batch, m, r]
  };

  int64_t rank_for(const at::Tensor& matrix) const {
    return std::min({matrix.size(0), matrix.size(1), options_.matrix_approximation_rank});
  }

  bool is_worth_compressing(const at::Tensor& matrix) const {
    const auto compressed =
        static_cast<double>((matrix.size(0) + matrix.size(1)) * rank_for(matrix));
    return compressed * options_.min_compression_rate < static_cast<double>(matrix.numel());
  }

  void sum_over_ranks(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    detail::start_all_reduce(tensor, group_)->wait();
  }

  // All collectives of a bucket are begun on the thread of backward, one after the other: begun
  // from continuations, those of two buckets could come in another order on another rank.
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
    sum_over_ranks(memory.p);  // orthogonalised next: no need to divide
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

  /// Of one wrapper, buckets stay as they are after the first step.
  static void check_size(Memory& memory, const at::Tensor& buffer) {
    if (!memory.error.defined() && !memory.q.defined()) memory.size = buffer.numel();
    if (memory.size == buffer.numel()) return;
    throw base::UserError(
        fmt::format("power_sgd_hook: a bucket has {} and had {} before; each "
                    "DistributedDataParallel needs a hook of its own",
                    base::counted(buffer.numel(), "value"), memory.size));
  }

  /// `whole` gets the gradients that are sent as they are.
  std::vector<Batch> make_batches(const c10d::GradBucket& bucket, std::vector<at::Tensor>& whole) {
    std::vector<Batch> batches;
    for (const at::Tensor& gradient : bucket.getGradients()) {
      const at::Tensor matrix =
          gradient.dim() == 0 ? gradient.view({1, 1}) : gradient.view({gradient.size(0), -1});
      if (!is_worth_compressing(matrix)) {
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
        // Behind the others of its shape: the order in which PyTorch lays factors out.
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

  /// Lets the factors of all batches lie side by side, so that one all-reduce takes them.
  void attach_factors(std::vector<Batch>& batches, Memory& memory,
                      const at::TensorOptions& options) {
    int64_t p_size = 0;
    int64_t q_size = 0;
    const auto sizes = [&](const Batch& batch) {
      const int64_t rows = batch.stacked.size(0) * rank_for(batch.matrices[0]);
      return std::pair(rows * batch.stacked.size(1), rows * batch.stacked.size(2));
    };
    for (const Batch& batch : batches) {
      p_size += sizes(batch).first;
      q_size += sizes(batch).second;
    }
    const bool fresh = !memory.q.defined();
    if (fresh) {
      memory.p = at::empty({p_size}, options);
      memory.q = at::empty({q_size}, options);
    }
    int64_t p_begin = 0;
    int64_t q_begin = 0;
    for (Batch& batch : batches) {
      const auto [p, q] = sizes(batch);
      const int64_t count = batch.stacked.size(0);
      const int64_t rank = rank_for(batch.matrices[0]);
      batch.p = memory.p.narrow(0, p_begin, p).view({count, batch.stacked.size(1), rank});
      batch.q = memory.q.narrow(0, q_begin, q).view({count, batch.stacked.size(2), rank});
      p_begin += p;
      q_begin += q;
    }
    if (fresh) draw_factors(batches);
    if (!fresh) {
      for (Batch& batch : batches) orthogonalize(batch.q, options_.orthogonalization_epsilon);
    }
  }

  /// The same on all ranks, without touching the program's own random numbers.
  void draw_factors(std::vector<Batch>& batches) {
    const at::Generator generator = at::detail::createCPUGenerator(seeds_.next());
    for (Batch& batch : batches) {
      batch.q.copy_(at::randn(batch.q.sizes(), generator, batch.q.options().device(at::kCPU)));
      orthogonalize(batch.q, options_.orthogonalization_epsilon);
    }
  }

  void send_whole(const std::vector<at::Tensor>& gradients) {
    if (gradients.empty()) return;
    std::vector<at::Tensor> flat;
    flat.reserve(gradients.size());
    for (const at::Tensor& gradient : gradients) flat.push_back(gradient.reshape({-1}));
    const at::Tensor all = at::cat(flat);
    sum_over_ranks(all);
    all.div_(group_->getSize());
    int64_t begin = 0;
    for (const at::Tensor& gradient : gradients) {
      gradient.copy_(all.narrow(0, begin, gradient.numel()).view_as(gradient));
      begin += gradient.numel();
    }
  }

  const PowerSgdOptions options_;
  SeedSequence seeds_;
  ProcessGroupPtr group_;
  int64_t step_ = 0;
  std::map<size_t, Memory> memory_;  ///< by index of the bucket
};

void check(const PowerSgdOptions& options) {
  if (options.matrix_approximation_rank < 1) {
    throw base::UserError(
        fmt::format("power_sgd_hook: matrix_approximation_rank must be 1 or more, got {}",
                    options.matrix_approximation_rank));
  }
  if ((options.use_error_feedback || options.warm_start) && options.start_power_sgd_iter < 2) {
    throw base::UserError(fmt::format(
        "power_sgd_hook: start_power_sgd_iter must be 2 or more with error feedback or warm start, "
        "got {}: DDP arranges its buckets anew after the first step",
        options.start_power_sgd_iter));
  }
}

}  // namespace

CommHook power_sgd_hook(const PowerSgdOptions& options) {
  check(options);
  return [state = std::make_shared<PowerSgd>(options)](c10d::GradBucket& bucket) {
    return state->run(bucket);
  };
}

}  // namespace syncbn::dist

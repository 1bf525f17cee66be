#include "backend.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::dist::detail {
namespace {

/// Which collective it was, to be told when it fails.
struct Label {
  const char* name;
  uint64_t sequence;
  int rank;
  int world_size;
  std::string group;

  /// Of the exception being handled, without libtorch's stack frames.
  static std::string reason() {
    try {
      throw;
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  /// While it was under way: the network, or a peer.
  [[noreturn]] void rethrow() const {
    throw base::UnavailableError(
        fmt::format("rank {} of {} on {}: {} #{} of group '{}' failed: {}. Another rank probably "
                    "ended or is stuck: its own message, if any, says why",
                    rank, world_size, base::hostname(), name, sequence, group, reason()));
  }

  /// Before it began: its arguments.
  [[noreturn]] void rethrow_refusal() const {
    throw base::UserError(fmt::format("rank {} of {}: {} #{} of group '{}' was refused: {}", rank,
                                      world_size, name, sequence, group, reason()));
  }
};

/// A collective under way: the library's own work, with its errors named.
class NamedWork : public c10d::Work {
 public:
  NamedWork(Label label, c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner, bool on_cpu)
      : c10d::Work(label.rank, type),
        label_(std::move(label)),
        inner_(std::move(inner)),
        on_cpu_(on_cpu) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return label_.sequence; }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return inner_->wait(timeout);
    } catch (...) {
      label_.rethrow();
    }
  }

  // DDP's reducer waits for this future, not for the work. NCCL's future carries streams, which a
  // continuation would have to follow: it is passed on as it is.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = inner_->getFuture();
    if (!on_cpu_) return future;
    return future->then(
        [label = label_](c10::ivalue::Future& done) {
          if (done.hasError()) {
            try {
              std::rethrow_exception(done.exception_ptr());
            } catch (...) {
              label.rethrow();
            }
          }
          return done.value();
        },
        future->elementType());
  }

 private:
  const Label label_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  const bool on_cpu_;
};

}  // namespace

Backend::Backend(Delegates delegates, std::string group_name, std::chrono::milliseconds timeout)
    : c10d::Backend(delegates.cpu->getRank(), delegates.cpu->getSize()),
      delegates_(std::move(delegates)),
      group_name_(std::move(group_name)),
      timeout_(timeout) {}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  delegates_.cpu->setTimeout(timeout);
  if (delegates_.cuda) delegates_.cuda->setTimeout(timeout);
}

void Backend::shutdown() {
  delegates_.cpu->shutdown();
  if (delegates_.cuda) delegates_.cuda->shutdown();
}

void Backend::abort() {
  delegates_.cpu->abort();
  if (delegates_.cuda) delegates_.cuda->abort();
}

c10d::Backend& Backend::delegate(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return *delegates_.cpu;
  if (tensor.is_cuda() && delegates_.cuda) return *delegates_.cuda;
  throw base::UserError(fmt::format(
      "process group '{}' has no backend for tensors on {}; initialise it with backend '{}'",
      group_name_, tensor.device().str(), tensor.is_cuda() ? "nccl" : "auto"));
}

template <class Start>
Backend::WorkPtr Backend::run(c10d::OpType type, const char* name, const at::Tensor& tensor,
                              Start&& start) {
  c10d::Backend& library = delegate(tensor);
  Label label{name, ++sequence_, rank_, size_, group_name_};
  const bool on_cpu = &library == delegates_.cpu.get();
  WorkPtr work;
  try {
    work = start(library);
  } catch (...) {
    // Gloo only queues here; NCCL also connects.
    if (on_cpu) label.rethrow_refusal();
    label.rethrow();
  }
  return c10::make_intrusive<NamedWork>(std::move(label), type, std::move(work), on_cpu);
}

namespace {

// The first tensor says where a collective runs; an empty list means the CPU.
const at::Tensor& first(const std::vector<at::Tensor>& tensors) {
  static const at::Tensor none;
  return tensors.empty() ? none : tensors.front();
}

}  // namespace

using c10d::OpType;

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(OpType::BROADCAST, "broadcast", first(tensors),
             [&](c10d::Backend& library) { return library.broadcast(tensors, options); });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(OpType::ALLREDUCE, "all_reduce", first(tensors),
             [&](c10d::Backend& library) { return library.allreduce(tensors, options); });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return run(OpType::_ALLREDUCE_SPARSE, "all_reduce (sparse)", first(tensors),
             [&](c10d::Backend& library) { return library.allreduce_sparse(tensors, options); });
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return run(OpType::ALLREDUCE_COALESCED, "all_reduce (coalesced)", first(tensors),
             [&](c10d::Backend& library) { return library.allreduce_coalesced(tensors, options); });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(OpType::REDUCE, "reduce", first(tensors),
             [&](c10d::Backend& library) { return library.reduce(tensors, options); });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return run(OpType::ALLGATHER, "all_gather", first(inputs),
             [&](c10d::Backend& library) { return library.allgather(outputs, inputs, options); });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return run(OpType::_ALLGATHER_BASE, "all_gather", input, [&](c10d::Backend& library) {
    return library._allgather_base(output, input, options);
  });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return run(OpType::ALLGATHER_COALESCED, "all_gather (coalesced)", first(inputs),
             [&](c10d::Backend& library) {
               return library.allgather_into_tensor_coalesced(outputs, inputs, options);
             });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return run(OpType::GATHER, "gather", first(inputs),
             [&](c10d::Backend& library) { return library.gather(outputs, inputs, options); });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  return run(OpType::SCATTER, "scatter", first(outputs),
             [&](c10d::Backend& library) { return library.scatter(outputs, inputs, options); });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  return run(OpType::REDUCE_SCATTER, "reduce_scatter", first(outputs), [&](c10d::Backend& library) {
    return library.reduce_scatter(outputs, inputs, options);
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", input, [&](c10d::Backend& library) {
    return library._reduce_scatter_base(output, input, options);
  });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  return run(OpType::ALLTOALL_BASE, "all_to_all", input, [&](c10d::Backend& library) {
    return library.alltoall_base(output, input, output_splits, input_splits, options);
  });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  return run(OpType::ALLTOALL, "all_to_all", first(inputs),
             [&](c10d::Backend& library) { return library.alltoall(outputs, inputs, options); });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  return run(OpType::SEND, "send", first(tensors),
             [&](c10d::Backend& library) { return library.send(tensors, destination, tag); });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  return run(OpType::RECV, "recv", first(tensors),
             [&](c10d::Backend& library) { return library.recv(tensors, source, tag); });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  // A barrier is about processes: Gloo serves it for GPU groups too, without touching a stream.
  return run(OpType::BARRIER, "barrier", at::Tensor(),
             [&](c10d::Backend& library) { return library.barrier(options); });
}

}  // namespace syncbn::dist::detail

#include "transport/backend.h"

#include <c10/util/hash.h>
#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <optional>

#include "monitor/annotated_work.h"
#include "transport/gloo.h"
#include "transport/no_sigpipe.h"
#include "transport/shared_memory.h"

namespace syncbn::dist::detail {

Backend::Backend(Delegates delegates, std::string group_name, std::chrono::milliseconds timeout,
                 Members members, const std::shared_ptr<PeerMonitor>& watch)
    : c10d::Backend(delegates.cpu->getRank(), delegates.cpu->getSize()),
      delegates_(std::move(delegates)),
      group_name_(std::move(group_name)),
      timeout_(timeout),
      members_(std::move(members)),
      watch_(watch),
      is_watched_(watch != nullptr),
      handle_(std::make_shared<GlooHandle>()),
      in_flight_headers_(delegates_.cuda ? InFlightHeaders::kMaxInFlight : 0),
      log_(std::make_shared<FlightRecorder>(group_name_, members_.ranks,
                                            [handle = handle_, shared = delegates_.shared] {
                                              if (shared) shared->break_off();
                                              const std::lock_guard lock(handle->mutex);
                                              if (handle->gloo != nullptr) {
                                                detail::break_off(*handle->gloo);
                                              }
                                            })) {
  handle_->gloo = delegates_.cpu.get();
  if (delegates_.shared) delegates_.shared->set_timeout(timeout);
  if (watch) watch->add(log_);
}

Backend::~Backend() {
  const std::lock_guard lock(handle_->mutex);
  handle_->gloo = nullptr;
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  delegates_.cpu->setTimeout(timeout);
  if (delegates_.shared) delegates_.shared->set_timeout(timeout);
  if (delegates_.cuda) delegates_.cuda->setTimeout(timeout);
}

void Backend::shutdown() {
  shut_down_ = true;
  in_flight_headers_.clear();
  if (delegates_.shared) delegates_.shared->shutdown();
  delegates_.cpu->shutdown();
  if (delegates_.cuda) delegates_.cuda->shutdown();
}

void Backend::abort() {
  log_->abort();
  if (delegates_.cuda) delegates_.cuda->abort();
}

void Backend::require_usable() const {
  if (::getpid() != process_) {
    throw base::UserError(fmt::format(
        "process group '{}' belongs to process {}, and this one, {}, was forked from it; form "
        "groups after a fork",
        group_name_, process_, ::getpid()));
  }
  if (shut_down_) {
    throw base::UserError(
        fmt::format("process group '{}' was shut down by destroy_process_group(); form a new one",
                    group_name_));
  }
}

c10d::Backend& Backend::delegate(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return *delegates_.cpu;
  // Gloo has some collectives for GPUs, too; it copies by way of the host.
  if (tensor.is_cuda()) return delegates_.cuda ? *delegates_.cuda : *delegates_.cpu;
  throw base::UserError(fmt::format(
      "process group '{}' has no backend for tensors on {}; move them to the CPU or a CUDA device",
      group_name_, tensor.device().str()));
}

Label Backend::label_of(const Call& call) const {
  return {call, members_.ranks[static_cast<size_t>(rank_)], members_.world_size, log_, watch_};
}

template <class Start>
Backend::WorkPtr Backend::start_by(c10d::Backend& library, const Call& call, bool by_gloo,
                                   Start&& start) const {
  if (by_gloo && is_watched_ && call.is_collective()) {
    // The number is below the fingerprint, since Gloo takes its meshes in turn by the tag.
    const uint32_t fingerprint = call.fingerprint();
    detail::set_next_tag(library,
                         fingerprint << 16 | static_cast<uint32_t>(call.sequence & 0xffff));
  }
  std::optional<NoSigpipe> sends_write_in_this_thread;
  if (!call.is_collective()) sends_write_in_this_thread.emplace();
  return start(library);
}

template <class Start>
Backend::WorkPtr Backend::run(const Call& call, const at::Tensor& tensor, Start&& start) {
  return run(call, tensor, start, [](shm::SharedMemory&, uint64_t) { return WorkPtr(); });
}

template <class Start, class Share>
Backend::WorkPtr Backend::run(Call call, const at::Tensor& tensor, Start&& start, Share&& share) {
  require_usable();
  c10d::Backend& library = delegate(tensor);
  NamedAs::apply_to(call);
  const bool by_gloo = &library == delegates_.cpu.get();
  const std::lock_guard lock(start_mutex_);
  const uint64_t earlier = call.is_collective() ? sequence_.load() : transfers_;
  call.sequence = earlier + 1;
  Label label = label_of(call);
  WorkPtr work;
  try {
    if (by_gloo && delegates_.shared) {
      work = share(*delegates_.shared, call.sequence << 16 | call.fingerprint());
    }
    if (work) {
      ++shared_calls_;
    } else {
      work = start_by(library, call, by_gloo, start);
    }
  } catch (const c10::Error&) {
    // Gloo has only looked at the arguments so far; NCCL also connects.
    if (by_gloo) label.rethrow_refusal();
    label.rethrow();
  } catch (const std::exception&) {
    label.rethrow();
  }
  // NCCL's works live on streams, and it has a watchdog of its own.
  if (by_gloo) log_->begin(call, work);
  if (call.is_collective()) {
    ++sequence_;
  } else {
    ++transfers_;
  }
  return c10::make_intrusive<AnnotatedWork>(std::move(label), std::move(work), by_gloo);
}

int Backend::wire_tag(int tag, const at::Tensor& tensor) const {
  if (!is_watched_ || !tensor.is_cpu()) return tag;
  const size_t hash = c10::get_hash(tag, static_cast<int>(tensor.scalar_type()), tensor.numel());
  return static_cast<int>((hash ^ (hash >> 32)) % static_cast<size_t>(kReservedTags));
}

namespace {

// The first tensor says where a collective runs; an empty list means the CPU.
const at::Tensor& first(const std::vector<at::Tensor>& tensors) {
  static const at::Tensor none;
  return tensors.empty() ? none : tensors.front();
}

/// A call in which dtypes agree between ranks.
Call call_of(c10d::OpType type, const char* name, const at::Tensor& tensor) {
  Call call;
  call.name = name;
  call.type = type;
  if (tensor.defined()) call.dtype = tensor.scalar_type();
  return call;
}

/// A call in which sizes agree, too.
Call same_sizes(c10d::OpType type, const char* name, const at::Tensor& tensor) {
  Call call = call_of(type, name, tensor);
  if (!tensor.defined() || tensor.is_sparse()) return call;
  call.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  call.has_sizes = true;
  return call;
}

Call with_root(Call call, int64_t root) {
  call.root = static_cast<int>(root);
  return call;
}

Call with_op(Call call, const c10d::ReduceOp& op) {
  call.reduce_op = static_cast<int>(op.op_);
  return call;
}

Call with_peer(Call call, int peer, int tag) {
  call.peer = peer;
  call.tag = tag;
  return call;
}

}  // namespace

using c10d::OpType;

bool Backend::gathers_at_once(const at::Tensor& row) const {
  return delegates_.shared && row.is_cpu() && row.numel() != 0 &&
         delegates_.shared->gathers_at_once(static_cast<int64_t>(row.nbytes()));
}

void Backend::gather_at_once(const at::Tensor& all, std::chrono::milliseconds timeout) {
  require_usable();
  Call call = call_of(OpType::_ALLGATHER_BASE, "all_gather", all);
  call.sizes = {1, all.size(1)};
  call.has_sizes = true;
  NamedAs::apply_to(call);
  try {
    shm::Exchange::TaskPtr task;
    {
      const std::lock_guard lock(start_mutex_);
      call.sequence = sequence_ + 1;
      task =
          delegates_.shared->gather_at_once(call.sequence << 16 | call.fingerprint(), all, timeout);
      log_->begin(call, WorkPtr());
      ++sequence_;
      ++shared_calls_;
    }
    delegates_.shared->wait(task);
  } catch (const std::exception&) {
    label_of(call).rethrow();
  }
  log_->succeed(call);
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(
      with_root(same_sizes(OpType::BROADCAST, "broadcast", first(tensors)), options.rootRank),
      first(tensors), [&](c10d::Backend& library) { return library.broadcast(tensors, options); },
      [&](shm::SharedMemory& shared, uint64_t tag) {
        return shared.broadcast(tag, tensors, options);
      });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(
      with_op(same_sizes(OpType::ALLREDUCE, "all_reduce", first(tensors)), options.reduceOp),
      first(tensors), [&](c10d::Backend& library) { return library.allreduce(tensors, options); },
      [&](shm::SharedMemory& shared, uint64_t tag) {
        return shared.allreduce(tag, tensors, options);
      });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return run(with_op(same_sizes(OpType::_ALLREDUCE_SPARSE, "all_reduce (sparse)", first(tensors)),
                     options.reduceOp),
             first(tensors),
             [&](c10d::Backend& library) { return library.allreduce_sparse(tensors, options); });
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return run(
      with_op(same_sizes(OpType::ALLREDUCE_COALESCED, "all_reduce (coalesced)", first(tensors)),
              options.reduceOp),
      first(tensors),
      [&](c10d::Backend& library) { return library.allreduce_coalesced(tensors, options); });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(
      with_op(with_root(same_sizes(OpType::REDUCE, "reduce", first(tensors)), options.rootRank),
              options.reduceOp),
      first(tensors), [&](c10d::Backend& library) { return library.reduce(tensors, options); });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return run(
      same_sizes(OpType::ALLGATHER, "all_gather", first(inputs)), first(inputs),
      [&](c10d::Backend& library) { return library.allgather(outputs, inputs, options); },
      [&](shm::SharedMemory& shared, uint64_t tag) {
        return shared.allgather(tag, outputs, inputs, options);
      });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return run(
      same_sizes(OpType::_ALLGATHER_BASE, "all_gather", input), input,
      [&](c10d::Backend& library) { return library._allgather_base(output, input, options); },
      [&](shm::SharedMemory& shared, uint64_t tag) {
        return shared.allgather_base(tag, output, input, options);
      });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return run(same_sizes(OpType::ALLGATHER_COALESCED, "all_gather (coalesced)", first(inputs)),
             first(inputs), [&](c10d::Backend& library) {
               return library.allgather_into_tensor_coalesced(outputs, inputs, options);
             });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return run(with_root(same_sizes(OpType::GATHER, "gather", first(inputs)), options.rootRank),
             first(inputs),
             [&](c10d::Backend& library) { return library.gather(outputs, inputs, options); });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  return run(with_root(same_sizes(OpType::SCATTER, "scatter", first(outputs)), options.rootRank),
             first(outputs),
             [&](c10d::Backend& library) { return library.scatter(outputs, inputs, options); });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  return run(with_op(same_sizes(OpType::REDUCE_SCATTER, "reduce_scatter", first(outputs)),
                     options.reduceOp),
             first(outputs), [&](c10d::Backend& library) {
               return library.reduce_scatter(outputs, inputs, options);
             });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  return run(
      with_op(same_sizes(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", input), options.reduceOp),
      input,
      [&](c10d::Backend& library) { return library._reduce_scatter_base(output, input, options); });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  const bool equal_splits = output_splits.empty() && input_splits.empty();
  const auto describe = equal_splits ? same_sizes : call_of;
  return run(describe(OpType::ALLTOALL_BASE, "all_to_all", input), input,
             [&](c10d::Backend& library) {
               return library.alltoall_base(output, input, output_splits, input_splits, options);
             });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  return run(call_of(OpType::ALLTOALL, "all_to_all", first(inputs)), first(inputs),
             [&](c10d::Backend& library) { return library.alltoall(outputs, inputs, options); });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = first(tensors);
  const int peer = members_.ranks.at(static_cast<size_t>(destination));
  return run(with_peer(same_sizes(OpType::SEND, "send", tensor), peer, tag), tensor,
             [&](c10d::Backend& library) {
               return library.send(tensors, destination, wire_tag(tag, tensor));
             });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor& tensor = first(tensors);
  const int peer = members_.ranks.at(static_cast<size_t>(source));
  return run(
      with_peer(same_sizes(OpType::RECV, "recv", tensor), peer, tag), tensor,
      [&](c10d::Backend& library) { return library.recv(tensors, source, wire_tag(tag, tensor)); });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  // A barrier is about processes: Gloo serves it for GPU groups too, without touching a stream.
  return run(
      call_of(OpType::BARRIER, "barrier", at::Tensor()), at::Tensor(),
      [&](c10d::Backend& library) { return library.barrier(options); },
      [&](shm::SharedMemory& shared, uint64_t tag) { return shared.barrier(tag, options); });
}

}  // namespace syncbn::dist::detail

#include "transport/backend.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/plain_message.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "monitor/nccl_misuse.h"
#include "transport/shared_memory.h"
#include "transport/timeouts.h"
#include "transport/wait_while.h"

namespace syncbn::dist::detail {

namespace {

/// Why a call failed.
struct Reason {
  std::string text;
  bool is_timeout = false;
};

/// Describes the exception being handled, without stack frames and Gloo's source lines.
Reason reason() {
  Reason why;
  try {
    throw;
  } catch (const std::exception& error) {
    why.text = plain_message(error);
    why.is_timeout = dynamic_cast<const TimedOut*>(&error) != nullptr;
  }
  const bool has_file = why.text.starts_with("[/") || why.text.starts_with("[.");
  const size_t place = has_file ? why.text.find("] ") : std::string::npos;
  if (place != std::string::npos) why.text.erase(0, place + 2);
  // Gloo and libtorch use the same exception types for timeouts and other errors.
  why.is_timeout = why.is_timeout || why.text.starts_with("Timed out waiting ") ||
                   why.text.starts_with("Operation timed out");
  return why;
}

/// Whether a check by libtorch of a call's arguments has failed.
bool is_about_arguments(const std::exception& error) {
  return dynamic_cast<const c10::Error*>(&error) != nullptr &&
         dynamic_cast<const c10::DistError*>(&error) == nullptr &&
         dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr &&
         dynamic_cast<const c10::AcceleratorError*>(&error) == nullptr;  // an earlier kernel's
}

/// Whether it is an error of NCCL that no other rank can cause.
bool is_failure_of_this_rank(const std::string& why) {
  return why.find("ncclUnhandledCudaError") != std::string::npos ||
         why.find("ncclSystemError") != std::string::npos;
}

}  // namespace

/// A call as errors describe it.
struct Label {
  Call call;
  int rank;  ///< in the world
  int world_size;
  std::shared_ptr<FlightRecorder> log;
  std::weak_ptr<PeerMonitor> monitor;
  std::shared_ptr<Transport> cuda;  ///< may be null

  /// Throws an error that names the call and the cause.
  /// @param reason why the call failed; not given: the exception being handled.
  /// @throws PeerError; base::UserError if the ranks made different calls, or this rank has
  ///   destroyed the group; base::InternalError if NCCL failed on this rank.
  [[noreturn]] void rethrow(const Reason& reason = detail::reason()) const {
    const std::string& why = reason.text;
    log->fail(call);
    const std::string failed = fmt::format("rank {} of {} on {}: {} failed: ", rank, world_size,
                                           base::hostname(), subject());
    if (log->was_closed()) {
      throw base::UserError(failed +
                            "this rank has called destroy_process_group() before the call was "
                            "complete; wait for it first");
    }
    PeerMonitor::Cause cause;
    if (const auto alive = monitor.lock())
      cause = alive->cause_of(*log, call, why, reason.is_timeout);
    const std::string file = cuda ? cuda->record_of_calls() : "";
    const std::string record = file.empty() ? "" : fmt::format(" (NCCL's calls: {})", file);
    if (cause.ranks_disagree) {
      throw base::UserError(fmt::format(
          "{}the ranks made different calls: {}; {}{}", failed, cause.text,
          call.is_collective()
              ? "every rank of a group must call the same collectives in the same order, with "
                "tensors of the same dtype and sizes"
              : "sender and receiver must use the same dtype and number of elements",
          record));
    }
    if (!cause.text.empty()) {
      throw PeerError(fmt::format("{}{}. That rank's own message, if any, says why{}", failed,
                                  cause.text, record));
    }
    if (is_failure_of_this_rank(why)) {
      throw base::InternalError(
          fmt::format("{}NCCL failed on this rank: {}{}", failed, why, record));
    }
    throw PeerError(fmt::format(
        "{}{}. Another rank probably ended or is stuck: its own message, if any, says why{}",
        failed, why, record));
  }

  /// Prints what rethrow() throws, and ends the process without destructors.
  [[noreturn]] void leave(const char* what) const {
    int exit_code = base::kExitUnavailable;
    try {
      rethrow({"it was aborted"});
    } catch (const base::Error& error) {
      exit_code = error.exit_code();
      base::write_stderr(fmt::format("{}: error: {}; {} does not return, so this process ends\n",
                                     ::program_invocation_short_name, error.what(), what));
    }
    PeerMonitor::leave_with(exit_code);
    ::_exit(exit_code);
  }

  /// @param why not given: the exception being handled, about the call's arguments.
  /// @throws base::UserError.
  [[noreturn]] void rethrow_refusal(const std::string& why = reason().text) const {
    throw base::UserError(fmt::format("rank {} of {}: {} was refused: {} ({})", rank, world_size,
                                      subject(), why, call.describe()));
  }

  /// Rethrows the exception being handled, of a call that a CPU transport has started. libtorch
  /// checks some arguments in Gloo's threads, before they communicate: then all ranks refuse the
  /// call, and the group can go on.
  [[noreturn]] void rethrow_of_work(const std::exception& error) const {
    if (is_about_arguments(error)) {
      log->succeed(call);
      rethrow_refusal();
    }
    rethrow();
  }

 private:
  std::string subject() const {
    const std::string peer =
        call.is_collective()
            ? ""
            : fmt::format(" {} rank {}", call.type == c10d::OpType::SEND ? "to" : "from",
                          call.peer);
    return fmt::format("{}{} of group '{}'", call.numbered(), peer, log->group());
  }
};

namespace {

/// Adds the call and the cause to the errors of the inner work.
class AnnotatedWork : public c10d::Work {
 public:
  AnnotatedWork(Label label, c10::intrusive_ptr<c10d::Work> inner, bool by_gloo)
      : c10d::Work(label.rank, label.call.type),
        label_(std::move(label)),
        inner_(std::move(inner)),
        by_gloo_(by_gloo) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return label_.call.sequence; }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      if (!by_gloo_) return wait_on_stream(timeout);
      label_.log->await(label_.call);
      const bool done = inner_->wait(timeout);
      label_.log->succeed(label_.call);
      return done;
    } catch (const std::exception& error) {
      abort_and_rethrow(error);
    }
  }

  // DDP's reducer waits for this future, not for the work. NCCL's future carries streams, which
  // then() would lose, so it is returned unchanged.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = inner_->getFuture();
    if (!by_gloo_) return future;
    label_.log->await(label_.call, /*is_blocked=*/false);  // DDP waits for no more than this
    return future->then(
        [label = label_](c10::ivalue::Future& done) {
          if (done.hasError()) {
            try {
              std::rethrow_exception(done.exception_ptr());
            } catch (const std::exception& error) {
              label.rethrow_of_work(error);
            }
          }
          label.log->succeed(label.call);
          return done.value();
        },
        future->elementType());
  }

 private:
  /// Makes the current stream wait, and with a timeout this thread as well. At the timeout,
  /// libtorch's own wait would abort NCCL, which may never return.
  bool wait_on_stream(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const bool done = inner_->wait(kNoTimeout);
    if (timeout == kNoTimeout) return done;
    while (!inner_->isCompleted()) {
      if (std::chrono::steady_clock::now() > deadline) {
        throw TimedOut(fmt::format("timed out after {} ms", timeout.count()));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (label_.log->failed()) throw std::runtime_error("the group was aborted");
    return true;
  }

  /// Rethrows the exception of inner_->wait() with the call's name. Aborts an operation that still
  /// runs, because it would read or overwrite tensors that the caller may reuse.
  [[noreturn]] void abort_and_rethrow(const std::exception& error) {
    try {
      // A wait that times out throws a c10::Error as well; the operation then still runs.
      by_gloo_ && inner_->isCompleted() ? label_.rethrow_of_work(error) : label_.rethrow();
    } catch (...) {
      if (!inner_->isCompleted()) {
        label_.log->abort(label_.call);
        if (!by_gloo_) throw;
        try {
          inner_->wait(kAbortTime);
        } catch (const std::exception&) {  // an aborted operation fails
        }
      }
      throw;
    }
  }

  /// Upper bound on the wait for an aborted operation to end.
  static constexpr std::chrono::seconds kAbortTime{10};

  const Label label_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  const bool by_gloo_;
};

/// Whether isCompleted() of Gloo's work is false until wait() is called.
bool completes_only_in_wait(c10d::OpType type) {
  using c10d::OpType;
  return type == OpType::SEND || type == OpType::RECV || type == OpType::REDUCE_SCATTER ||
         type == OpType::_REDUCE_SCATTER_BASE;
}

/// Refuses a call. Called while the exception about its arguments is being handled.
[[noreturn]] void refuse(const Label& label) {
  label.log->refuse(label.call);
  label.rethrow_refusal();
}

/// The options, changed so that the call returns its work. For a Python call with async_op=False,
/// NCCL would return none, and the flight recorder would not know when the call ends.
template <class Argument>
decltype(auto) with_work(Argument& argument) {
  if constexpr (requires { argument.asyncOp; }) {
    auto options = argument;
    options.asyncOp = true;
    return options;
  } else {
    return (argument);
  }
}

/// A call in which only the dtype must be the same on all ranks.
PlacedCall same_dtype(c10d::OpType type, const char* name, const at::Tensor& tensor) {
  PlacedCall placed{{}, tensor};
  placed.call.name = name;
  placed.call.type = type;
  if (tensor.defined()) placed.call.dtype = tensor.scalar_type();
  return placed;
}

/// A call in which dtype and sizes must be the same on all ranks.
PlacedCall same_sizes(c10d::OpType type, const char* name, const at::Tensor& tensor) {
  PlacedCall placed = same_dtype(type, name, tensor);
  if (!tensor.defined() || tensor.is_sparse()) return placed;
  placed.call.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  placed.call.has_sizes = true;
  return placed;
}

PlacedCall same_sizes(c10d::OpType type, const char* name, const std::vector<at::Tensor>& tensors) {
  return same_sizes(type, name, tensors.empty() ? at::Tensor() : tensors.front());
}

/// A call with several tensors, each of which must be the same on all ranks.
PlacedCall several(c10d::OpType type, const char* name, const std::vector<at::Tensor>& tensors) {
  PlacedCall placed = same_sizes(type, name, tensors);
  std::string& others = placed.call.others.emplace();
  for (size_t i = 1; i < tensors.size(); ++i) {
    others += fmt::format(", {} {}", c10::toString(tensors[i].scalar_type()),
                          c10::str(tensors[i].sizes()));
  }
  return placed;
}

PlacedCall with_peer(PlacedCall placed, int peer, int tag) {
  placed.call.peer = peer;
  placed.call.tag = tag;
  return placed;
}

}  // namespace

Backend::Backend(std::shared_ptr<Transport> cpu, std::shared_ptr<Transport> cuda,
                 std::string group_name, std::chrono::milliseconds timeout, Members members,
                 const std::shared_ptr<PeerMonitor>& monitor)
    : c10d::Backend(members.rank, static_cast<int>(members.ranks.size())),
      cpu_(std::move(cpu)),
      cuda_(std::move(cuda)),
      group_name_(std::move(group_name)),
      members_(std::move(members)),
      monitor_(monitor),
      is_monitored_(monitor != nullptr),
      abort_(std::make_shared<GroupAbort>(cpu_, cuda_)),
      log_(std::make_shared<FlightRecorder>(
          group_name_, members_.ranks,
          [abort = abort_](auto awaited_since) { abort->start(awaited_since); },
          base::FlightRecord::of_process(members_.ranks[static_cast<size_t>(rank_)],
                                         members_.world_size))) {
  Label unlogged = label_of({});
  unlogged.log.reset();  // it holds abort_, which would then hold it
  abort_->set_last_resort([unlogged, log = std::weak_ptr(log_)](const char* what) {
    Label label = unlogged;  // a copy: several threads may run this
    label.log = log.lock();
    if (!label.log) return;
    if (const auto failed = label.log->failed()) label.call = *failed;
    label.leave(what);
  });
  setTimeout(timeout);
  if (monitor) monitor->add(log_);
}

Backend::~Backend() {
  stop_threads();
  cpu_->close();
}

void Backend::stop_threads() {
  if (std::exchange(threads_stopped_, true)) return;
  if (::getpid() == process_ && (polling_threads_->close() || !start_queue_->is_idle())) abort();
  start_queue_->stop();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  cpu_->set_timeout(timeout);
  if (cuda_) cuda_->set_timeout(timeout);
}

void Backend::shutdown() {
  if (const auto hook = std::exchange(before_shutdown_, nullptr)) hook();
  if (shut_down_.exchange(true)) return;
  log_->close();
  stop_threads();
  cpu_->shutdown();
  close_cuda();
}

void Backend::abort() {
  abort_->start();
}

void Backend::close_cuda() {
  if (!cuda_ || std::exchange(cuda_closed_, true)) return;
  // The other ranks may not close theirs.
  if (std::uncaught_exceptions() > 0 || log_->failed()) return abort_->start();
  // A rank that has left closes its connection once its own communicators are destroyed.
  constexpr std::chrono::seconds kGrace{2};
  const auto deadline = std::chrono::steady_clock::now() + timeout_.load();
  const auto has_time = [&] { return std::chrono::steady_clock::now() < deadline; };
  const bool closed =
      wait_while([cuda = cuda_] { cuda->shutdown(); }, std::chrono::milliseconds(20),
                 [&] {
                   const auto alive = monitor_.lock();
                   const bool lost = alive && alive->has_lost(members_.ranks, kGrace);
                   return !lost && !log_->failed() && has_time();
                 });
  if (closed) return;
  PeerMonitor::skip_destructors();  // a thread is still inside NCCL
  if (has_time()) return;
  spdlog::warn("rank {} of {}: NCCL has not closed group '{}' within {} ms",
               members_.ranks[static_cast<size_t>(rank_)], members_.world_size, group_name_,
               timeout_.load().count());
}

void Backend::require_no_failure(const Call* next) const {
  std::optional<Call> failed = log_->failed();
  if (failed && failed->sequence == 0) {  // another rank's call
    failed = next != nullptr ? std::optional(*next) : std::nullopt;
  }
  if (failed) label_of(*failed).rethrow({"an earlier call of the group has failed"});
}

bool Backend::shares_memory() const {
  return dynamic_cast<const shm::SharedMemory*>(cpu_.get()) != nullptr;
}

uint64_t Backend::shared_calls() const {
  const auto* shared = dynamic_cast<const shm::SharedMemory*>(cpu_.get());
  return shared != nullptr ? shared->calls() : 0;
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

Transport& Backend::transport_for(const at::Tensor& tensor) const {
  if (!tensor.defined() || tensor.is_cpu()) return *cpu_;
  if (tensor.is_cuda()) return cuda_ ? *cuda_ : *cpu_;
  throw base::UserError(fmt::format(
      "process group '{}' has no backend for tensors on {}; move them to the CPU or a CUDA device",
      group_name_, tensor.device().str()));
}

Label Backend::label_of(const Call& call) const {
  return {call, members_.ranks[static_cast<size_t>(rank_)], members_.world_size, log_, monitor_,
          cuda_};
}

template <class Method, class... Arguments>
Backend::WorkPtr Backend::run(PlacedCall placed, Method method, Arguments&... arguments) {
  require_usable();
  Call& call = placed.call;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  const auto add_option = [&](const auto& argument) {
    if constexpr (requires { argument.timeout; }) timeout = argument.timeout;
    if constexpr (requires { argument.rootRank; }) call.root = static_cast<int>(argument.rootRank);
    if constexpr (requires { argument.reduceOp; }) {
      call.reduce_op = static_cast<int>(argument.reduceOp.op_);
    }
  };
  (add_option(arguments), ...);
  if (timeout == c10d::kUnsetTimeout) timeout = timeout_;
  Transport& transport = transport_for(placed.tensor);
  const bool on_streams = transport.runs_on_streams();
  NamedAs::apply_to(call);
  if (call.is_collective()) start_queue_->drain();
  FlightRecorder::Completion dropped;  // after the lock
  const std::lock_guard lock(start_mutex_);
  std::atomic<uint64_t>& calls = call.is_collective() ? sequence_ : transfers_;
  call.sequence = calls + 1;
  if (!call.is_collective()) call.with_peer = log_->next_with(call.peer, call.type);
  Label label = label_of(call);
  require_no_failure(&call);
  WorkPtr work;
  try {
    const GroupAbort::InCall in_call(*abort_);
    // Recorded before it starts: the first call of a kind over NCCL waits here until the ranks
    // connect.
    dropped = log_->begin(call, on_streams ? Timeout(timeout) : std::nullopt);
    work = (transport.prepare(call).*method)(with_work(arguments)...);
  } catch (const base::Error&) {
    log_->refuse(call);
    throw;
  } catch (const c10::DistError& error) {
    if (!on_streams || is_misuse_of_nccl(error)) refuse(label);
    label.rethrow();
  } catch (const c10::Error& error) {
    if (is_about_arguments(error)) refuse(label);
    log_->fail(call);
    throw;
  } catch (const std::exception&) {
    label.rethrow();
  }
  // Only the monitor queries GPUs.
  const bool has_completion = is_monitored_ || !on_streams;
  log_->set_completion(call, has_completion ? transport.completion_of(work) : nullptr,
                       has_completion ? transport.time_on_gpu_of(work) : nullptr);
  ++calls;
  if (!on_streams && completes_only_in_wait(call.type)) {
    work = c10::make_intrusive<PolledWork>(label.rank, call.type, std::move(work), timeout_.load(),
                                           polling_threads_);
  }
  return c10::make_intrusive<AnnotatedWork>(std::move(label), std::move(work), !on_streams);
}

using c10d::OpType;

bool Backend::gathers_in_one_hop(const at::Tensor& row) const {
  return row.is_cpu() && row.numel() != 0 && cpu_->gathers_in_one_hop(row.nbytes());
}

void Backend::allocate_registered(c10::function_ref<void()> allocate) {
  (cuda_ ? *cuda_ : *cpu_).allocate_registered(allocate);
}

template <class Body>
void Backend::run_blocking(Call call, const Body& body) {
  require_usable();
  NamedAs::apply_to(call);
  start_queue_->drain();
  FlightRecorder::Completion dropped;  // after the lock
  std::unique_lock lock(start_mutex_);
  call.sequence = sequence_ + 1;
  require_no_failure(&call);
  // Taken before the other ranks can receive this rank's part.
  const int64_t traced_since = trace_time();
  try {
    body(call, [&] {
      dropped = log_->begin(call, std::nullopt, traced_since);
      log_->await(call);
      ++sequence_;
      lock.unlock();
    });
  } catch (const std::exception&) {
    label_of(call).rethrow();
  }
  log_->succeed(call);
}

void Backend::gather_in_one_hop(const at::Tensor& all, std::chrono::milliseconds timeout) {
  Call call = same_sizes(OpType::_ALLGATHER_BASE, "all_gather", all).call;
  call.sizes[0] = 1;
  run_blocking(std::move(call), [&](const Call& numbered, c10::function_ref<void()> started) {
    cpu_->gather_in_one_hop(numbered, all, timeout, started);
  });
}

at::Tensor Backend::merge_in_tree(const at::Tensor& row, MergeRows merge,
                                  std::chrono::milliseconds timeout) {
  at::Tensor merged;
  run_blocking(same_sizes(OpType::ALLREDUCE, "merge", row).call,
               [&](const Call& numbered, c10::function_ref<void()> started) {
                 merged = cpu_->merge_in_tree(numbered, row, merge, timeout, started);
               });
  return merged;
}

Backend::WorkPtr Backend::start_gather_in_one_hop(const at::Tensor& all,
                                                  std::chrono::milliseconds timeout) {
  at::Tensor rows = all;
  at::Tensor own = all.narrow(0, rank_, 1);
  if (shares_memory()) {
    own = own.clone();
    return _allgather_base(rows, own, with_timeout<c10d::AllgatherOptions>(timeout));
  }
  // As Gloo::gather_in_one_hop().
  at::Tensor copies = own.expand_as(all).contiguous();
  std::vector<int64_t> equal_splits;
  const auto options = with_timeout<c10d::AllToAllOptions>(timeout);
  return run(same_sizes(OpType::_ALLGATHER_BASE, "all_gather", own), &c10d::Backend::alltoall_base,
             rows, copies, equal_splits, equal_splits, options);
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(same_sizes(OpType::BROADCAST, "broadcast", tensors), &c10d::Backend::broadcast,
             tensors, options);
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(same_sizes(OpType::ALLREDUCE, "all_reduce", tensors), &c10d::Backend::allreduce,
             tensors, options);
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return run(same_sizes(OpType::_ALLREDUCE_SPARSE, "all_reduce (sparse)", tensors),
             &c10d::Backend::allreduce_sparse, tensors, options);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return run(several(OpType::ALLREDUCE_COALESCED, "all_reduce (coalesced)", tensors),
             &c10d::Backend::allreduce_coalesced, tensors, options);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(same_sizes(OpType::REDUCE, "reduce", tensors), &c10d::Backend::reduce, tensors,
             options);
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return run(same_sizes(OpType::ALLGATHER, "all_gather", inputs), &c10d::Backend::allgather,
             outputs, inputs, options);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return run(same_sizes(OpType::_ALLGATHER_BASE, "all_gather", input),
             &c10d::Backend::_allgather_base, output, input, options);
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return run(several(OpType::ALLGATHER_COALESCED, "all_gather (coalesced lists)", inputs),
             &c10d::Backend::allgather_coalesced, outputs, inputs, options);
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return run(several(OpType::ALLGATHER_COALESCED, "all_gather (coalesced)", inputs),
             &c10d::Backend::allgather_into_tensor_coalesced, outputs, inputs, options);
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return run(same_sizes(OpType::GATHER, "gather", inputs), &c10d::Backend::gather, outputs, inputs,
             options);
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  return run(same_sizes(OpType::SCATTER, "scatter", outputs), &c10d::Backend::scatter, outputs,
             inputs, options);
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  // The ranks' outputs may differ in size, but each rank gives the same parts.
  const Tensors& parts = inputs.empty() ? outputs : inputs.front();
  const bool are_alike = std::all_of(parts.begin(), parts.end(), [&](const at::Tensor& part) {
    return part.sizes() == parts.front().sizes() && part.dtype() == parts.front().dtype();
  });
  return run(are_alike ? same_sizes(OpType::REDUCE_SCATTER, "reduce_scatter", parts)
                       : several(OpType::REDUCE_SCATTER, "reduce_scatter", parts),
             &c10d::Backend::reduce_scatter, outputs, inputs, options);
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  return run(same_sizes(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", input),
             &c10d::Backend::_reduce_scatter_base, output, input, options);
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return run(several(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter (coalesced)", inputs),
             &c10d::Backend::reduce_scatter_tensor_coalesced, outputs, inputs, options);
}

void Backend::refuse_all_to_all(const at::Tensor& input, const std::string& why) const {
  Call call = same_dtype(OpType::ALLTOALL_BASE, "all_to_all", input).call;
  call.sequence = sequence_ + 1;
  label_of(call).rethrow_refusal(why);
}

/// Gloo ends the process if it receives more than expected, and leaves the rest of the output
/// unchanged if it receives less.
void Backend::require_matching_splits(const at::Tensor& output,
                                      const std::vector<int64_t>& output_splits,
                                      const at::Tensor& input,
                                      const std::vector<int64_t>& input_splits,
                                      std::chrono::milliseconds timeout) {
  std::vector<int64_t> counts;  // of elements: what this rank sends to each, then what it expects
  for (const auto& [tensor, splits] :
       {std::pair(&input, &input_splits), std::pair(&output, &output_splits)}) {
    const bool is_well_formed =
        tensor->dim() > 0 && (splits->empty() || splits->size() == static_cast<size_t>(size_));
    // The call itself refuses malformed splits. Python ranks would not take part in the comparison.
    if (!is_well_formed || !is_monitored_) return;
    const int64_t row = tensor->numel() / std::max<int64_t>(1, tensor->size(0));
    for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {
      counts.push_back(splits->empty() ? tensor->numel() / size_ : (*splits)[rank] * row);
    }
  }
  at::Tensor own = at::tensor(counts, at::kLong).unsqueeze(0);
  at::Tensor all = at::empty({size_, own.size(1)}, at::kLong);
  {
    const NamedAs named("all_to_all's split sizes", own.sizes());
    _allgather_base(all, own, with_timeout<c10d::AllgatherOptions>(timeout))->wait();
  }
  const auto of_rank = all.accessor<int64_t, 2>();
  for (int sender = 0; sender < size_; ++sender) {
    for (int receiver = 0; receiver < size_; ++receiver) {
      const int64_t sent = of_rank[sender][receiver];
      const int64_t expected = of_rank[receiver][size_ + sender];
      if (sent == expected) continue;
      refuse_all_to_all(
          input,
          fmt::format("rank {} sends {} to rank {}, which expects {}",
                      members_.ranks[static_cast<size_t>(sender)], base::counted(sent, "element"),
                      members_.ranks[static_cast<size_t>(receiver)], expected));
    }
  }
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  const bool are_equal = output_splits.empty() && input_splits.empty();
  // Not over NCCL, where no call makes the host wait for other ranks.
  if (!are_equal && !transport_for(input).runs_on_streams()) {
    require_matching_splits(output, output_splits, input, input_splits, options.timeout);
  }
  return run(are_equal ? same_sizes(OpType::ALLTOALL_BASE, "all_to_all", input)
                       : same_dtype(OpType::ALLTOALL_BASE, "all_to_all", input),
             &c10d::Backend::alltoall_base, output, input, output_splits, input_splits, options);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  const at::Tensor first = inputs.empty() ? at::Tensor() : inputs.front();
  for (const auto& [role, list] : {std::pair("inputs", &inputs), std::pair("outputs", &outputs)}) {
    if (list->size() != static_cast<size_t>(size_)) {
      refuse_all_to_all(first, fmt::format("{} has length {}, and the group has {}: it needs one "
                                           "tensor for each",
                                           role, list->size(), base::counted(size_, "rank")));
    }
    for (const at::Tensor& tensor : *list) {
      if (tensor.scalar_type() == first.scalar_type()) continue;
      refuse_all_to_all(
          first, fmt::format("{} has a tensor of {}, and inputs[0] is of {}; all tensors need the "
                             "same dtype",
                             role, c10::toString(tensor.scalar_type()),
                             c10::toString(first.scalar_type())));
    }
  }
  if (transport_for(first).runs_on_streams()) {
    return run(same_dtype(OpType::ALLTOALL, "all_to_all", first), &c10d::Backend::alltoall, outputs,
               inputs, options);
  }
  // Before torch 2.12, Gloo has no all-to-all of lists. Blocks, as the check of the splits does
  // anyway.
  const auto flatten = [](const Tensors& tensors) {
    std::pair<Tensors, std::vector<int64_t>> flat;
    for (const at::Tensor& tensor : tensors) {
      flat.first.push_back(tensor.detach().reshape({-1}));
      flat.second.push_back(tensor.numel());
    }
    return flat;
  };
  auto [sent, input_splits] = flatten(inputs);
  auto [received, output_splits] = flatten(outputs);
  at::Tensor input = at::cat(sent);
  at::Tensor output = at::cat(received);
  received = output.split_with_sizes(output_splits);
  WorkPtr work = alltoall_base(output, input, output_splits, input_splits, options);
  work->wait();
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    outputs[rank].detach().copy_(received[rank].view(outputs[rank].sizes()));
  }
  return work;
}

int Backend::peer_in_world(const char* call, const char* role, int rank) const {
  if (rank >= 0 && rank < size_) return members_.ranks[static_cast<size_t>(rank)];
  throw base::UserError(
      fmt::format("{} on rank {} of {} of group '{}' was refused: {} {} is outside the group of {}",
                  call, rank_, size_, group_name_, role, rank, base::counted(size_, "rank")));
}

Backend::WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  const int peer = peer_in_world("send", "destination", destination);
  return run(with_peer(same_sizes(OpType::SEND, "send", tensors), peer, tag), &c10d::Backend::send,
             tensors, destination, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  const int peer = peer_in_world("recv", "source", source);
  return run(with_peer(same_sizes(OpType::RECV, "recv", tensors), peer, tag), &c10d::Backend::recv,
             tensors, source, tag);
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  // On the CPU for GPU groups as well: a barrier synchronises processes, not streams.
  return run(same_dtype(OpType::BARRIER, "barrier", at::Tensor()), &c10d::Backend::barrier,
             options);
}

}  // namespace syncbn::dist::detail

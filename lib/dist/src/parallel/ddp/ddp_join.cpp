#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <exception>
#include <future>
#include <vector>

#include <ATen/ops/full.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "ddp/comm_hook_steps.h"
#include "ddp/ddp_state.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace detail {
namespace {

bool span_is_open = false;  ///< for any module in this process

/// The collectives of join() carry one number, as PyTorch's do.
at::Tensor number(const DdpState& state, double value, at::ScalarType dtype = at::kFloat) {
  return at::full({1}, value, at::TensorOptions().dtype(dtype).device(state.first_device));
}

int64_t sum(const DdpState& state, int64_t own) {
  const at::Tensor total = number(state, static_cast<double>(own));
  start_all_reduce(total, state.group)->wait();
  return total.item().toLong();
}

/// The world ranks of a group's members, in the group's order.
std::vector<int> members(const ProcessGroupPtr& group) {
  const Backend* backend = backend_of(group);
  return backend != nullptr ? backend->members().ranks : std::vector<int>();
}

/// The group over which the module's SyncBatchNorm layers exchange; null: they exchange nothing.
ProcessGroupPtr shared_statistics_group(const DdpState& state) {
  ProcessGroupPtr shared;
  for (const ProcessGroupPtr& given : state.module->sync_layers().groups) {
    const ProcessGroupPtr group = statistics_group(given);
    const bool other = shared && group != shared;
    if (other || (group && members(group) != members(state.group))) {
      throw base::UserError(
          "join: the SyncBatchNorm layers of the module exchange over other ranks than "
          "DistributedDataParallel does, or over several groups; give all of them one group of the "
          "same ranks, or leave process_group empty");
    }
    shared = group;
  }
  if (shared && shared == state.group) {
    throw base::UserError(
        "join: the SyncBatchNorm layers exchange over DistributedDataParallel's own group, where "
        "their exchanges can be confused with those of gradients; leave their process_group empty, "
        "or make a second group of the same ranks");
  }
  return shared && shared->getSize() > 1 ? shared : nullptr;
}

/// The devices of the module's SyncBatchNorm layers, in the same order on all ranks.
std::vector<at::Device> devices_of_statistics(const DdpState& state) {
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : state.module->sync_layers().statistics) {
    if (std::ranges::count(devices, tensor.device()) == 0) devices.push_back(tensor.device());
  }
  if (devices.empty()) devices.push_back(state.first_device);
  return devices;
}

void close_span(DdpState& state) {
  state.join.reset();
  span_is_open = false;
  // Without this, the reducer would keep dividing by the number of ranks with input in the last
  // step.
  state.reducer->set_forward_pass_work_handle(nullptr, /*useStaticWorldSize=*/true);
}

/// Moves this thread to side streams on its GPUs. On destruction it returns to the former streams,
/// which then wait for the side streams.
class SideStreams {
 public:
  explicit SideStreams(const std::vector<at::Device>& devices) {
    for (const at::Device& device : devices) {
      if (!device.is_cuda()) continue;
      const c10::impl::VirtualGuardImpl guard(device.type());
      streams_.push_back({guard.getStream(device), guard.getStreamFromGlobalPool(device)});
      wait(streams_.back().side, streams_.back().former);
    }
    enter();
  }
  ~SideStreams() {
    leave();
    for (const auto& [former, side] : streams_) wait(former, side);
  }
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  /// Returns to the former streams until enter().
  void leave() const {
    for (const auto& [former, side] : streams_) set(former);
  }
  void enter() const {
    for (const auto& [former, side] : streams_) set(side);
  }

 private:
  struct Pair {
    c10::Stream former;
    c10::Stream side;
  };

  static void set(c10::Stream stream) {
    c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  }
  static void wait(c10::Stream waiting, c10::Stream other) {
    c10::Event event(other.device_type());
    event.record(other);
    event.block(waiting);
  }

  std::vector<Pair> streams_;
};

/// Joins the exchange of gradients in a backward that only other ranks run.
class JoinedGradients {
 public:
  explicit JoinedGradients(DdpState& state) : state_(state) {}

  void start() {
    if (is_delayed()) use_nothing();
    for (c10d::GradBucket& bucket :
         state_.reducer->get_grad_buckets(/*return_zero_tensors=*/true)) {
      pending_.push_back(state_.reducer->run_comm_hook(bucket));
    }
  }
  void finish() {
    for (const FuturePtr& future : pending_) future->waitAndThrow();
    if (state_.searches_unused()) use_nothing();
    // Unless communication is delayed, the other ranks' reducers have recorded the order of
    // gradients for rebuild_buckets(): record one here as well.
    if (!is_delayed()) state_.reducer->push_rebuilt_params_for_all_indices();
    state_.had_first_backward = true;
  }
  void run() {
    start();
    finish();
  }

 private:
  /// Whether the other ranks exchange gradients only after their backward has ended.
  bool is_delayed() const { return state_.options.static_graph && !state_.had_first_backward; }
  /// Tells the other ranks that this one used no parameter. Zeroes the map each time, because the
  /// all-reduce leaves the other ranks' marks in it.
  void use_nothing() const {
    start_all_reduce(state_.reducer->get_local_used_map_on_device().zero_(), state_.group)->wait();
  }

  DdpState& state_;
  std::vector<FuturePtr> pending_;
};

/// Joins the exchanges of a backward, those of gradients and of statistics in any order.
void join_backward(DdpState& state, JoinStatistics& statistics) {
  JoinedGradients gradients(state);
  const Backend* const backend = backend_of(state.group);
  if (backend != nullptr && backend->runs_on_streams(state.parameters.front().tensor)) {
    // One thread, because two that launch on two communicators may deadlock. Two streams, because
    // statistics that other ranks need first must not queue behind gradients.
    const SideStreams side(devices_of_statistics(state));
    gradients.start();
    side.leave();
    statistics.serve();
    side.enter();
    gradients.finish();
  } else {
    // A hook may block until all ranks have the bucket.
    auto exchange = std::async(std::launch::async, [&] { gradients.run(); });
    statistics.serve();
    exchange.get();
  }
}

/// Joins one step of the ranks that still have input.
void join_step(DdpState& state) {
  JoinStatistics* const statistics = state.join->statistics.get();
  state.reducer->rebuild_buckets();
  if (const auto buffers = state.buffers_to_sync(); !buffers.empty()) {
    state.broadcast(buffers, highest_rank(state, false));
  }
  const bool gradients_follow = sum(state, 0) != 0;
  state.sync_buffers_next = gradients_follow;
  const bool statistics_follow = statistics != nullptr && statistics->serve();
  if (gradients_follow && statistics_follow) {
    join_backward(state, *statistics);
  } else if (statistics_follow) {
    statistics->serve();
  } else if (gradients_follow) {
    JoinedGradients(state).run();
  }
}

}  // namespace

void notify_joined_ranks(DdpState& state) {
  const at::Tensor with_input = number(state, 1);
  const auto work = start_all_reduce(with_input, state.group);
  if (state.join->options.throw_on_early_termination && sum(state, 0) != 0) {
    throw EarlyTermination(
        "join: another rank has run out of input, and throw_on_early_termination ends all of them");
  }
  state.reducer->set_forward_pass_work_handle(work,
                                              state.join->options.divide_by_initial_world_size);
  if (state.join->statistics) {
    state.join->statistics->begin_step([work, with_input, size = state.group->getSize()] {
      work->wait();
      return with_input.item().toInt() != size;
    });
  }
}

int highest_rank(const DdpState& state, bool yes) {
  const at::Tensor highest = number(state, yes ? state.group->getRank() : -1, at::kLong);
  start_all_reduce(highest, state.group, c10d::ReduceOp::MAX)->wait();
  return highest.item().toInt();
}

void announce_whether_gradients_follow(DdpState& state) {
  start_all_reduce(number(state, state.requires_sync() ? 1 : 0), state.group);
}

JoinGuard DdpBase::join(const JoinOptions& options) {
  return {state_, options};
}

}  // namespace detail

JoinGuard::JoinGuard(std::shared_ptr<detail::DdpState> given, const JoinOptions& options)
    : exceptions_before_(std::uncaught_exceptions()) {
  if (!options.enable) return;
  detail::DdpState& state = *given;
  if (detail::span_is_open) {
    throw base::UserError("join: a span is open already in this process; open one at a time");
  }
  if (state.options.skip_all_reduce_unused_params) {
    throw base::UserError("join: cannot be combined with skip_all_reduce_unused_params");
  }
  const auto group = detail::shared_statistics_group(state);
  state.join = {.options = options, .statistics = nullptr};
  if (group) {
    state.join->statistics =
        std::make_unique<detail::JoinStatistics>(group, detail::devices_of_statistics(state));
  }
  state.logger->set_uneven_input_join();
  detail::span_is_open = true;
  state_ = std::move(given);
}

JoinGuard::~JoinGuard() noexcept(false) {
  if (!state_) return;
  if (std::uncaught_exceptions() > exceptions_before_) {
    detail::close_span(*state_);
    return;
  }
  finish();
}

void JoinGuard::finish() {
  if (!state_) return;
  struct Span {
    const std::shared_ptr<detail::DdpState> state;
    ~Span() { detail::close_span(*state); }
  } const span{std::exchange(state_, nullptr)};
  detail::DdpState& state = *span.state;
  bool is_last = true;
  while (detail::sum(state, 0) != 0) {
    if (state.join->options.throw_on_early_termination) {
      detail::sum(state, 1);
      throw EarlyTermination(fmt::format(
          "join: rank {} has run out of input and others have not; throw_on_early_termination "
          "ends all of them",
          detail::world_rank(state.group, state.group->getRank())));
    }
    detail::join_step(state);
    is_last = false;
  }
  const int source = detail::highest_rank(state, is_last);
  state.broadcast_module(source);
  if (!state.options.broadcast_buffers) {
    state.broadcast(state.module->sync_layers().statistics, source);
  }
}

}  // namespace syncbn::dist

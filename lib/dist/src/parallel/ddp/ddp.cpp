#include <syncbn/dist/ddp.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <limits>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "ddp/ddp_state.h"
#include "groups/world.h"

namespace syncbn::dist {
namespace detail {
namespace {

constexpr size_t kBroadcastBucketBytes = size_t{250} * 1024 * 1024;
constexpr double kBytesPerMiB = 1024.0 * 1024.0;
constexpr double kMaxBucketMiB = 1e6;

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& all) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(all.size());
  for (const NamedTensor& one : all) tensors.push_back(one.tensor);
  return tensors;
}

std::vector<NamedTensor> without(std::vector<NamedTensor> all,
                                 const std::unordered_set<std::string>& names) {
  std::erase_if(all, [&](const NamedTensor& one) { return names.contains(one.name); });
  return all;
}

void check_options(const DdpOptions& options) {
  const auto check = [](const char* name, const std::optional<double>& value) {
    if (!value || (*value > 0 && *value <= kMaxBucketMiB)) return;
    throw base::UserError(
        fmt::format("DistributedDataParallel: {} must be above 0 and at most {}, got {}", name,
                    kMaxBucketMiB, *value));
  };
  check("bucket_cap_mb", options.bucket_cap_mb);
  check("first_bucket_cap_mb", options.first_bucket_cap_mb);
}

/// Refuses unknown names: DDP would average the parameter whose name is misspelt.
void check_ignored(const DdpState& state) {
  std::unordered_set<std::string> unknown = state.ignored;
  for (const NamedTensor& one : state.module->parameters()) unknown.erase(one.name);
  for (const NamedTensor& one : state.module->buffers()) unknown.erase(one.name);
  if (unknown.empty()) return;
  throw base::UserError(
      fmt::format("DistributedDataParallel: parameters_to_ignore names '{}', which is neither a "
                  "parameter nor a buffer of the module; write names as named_parameters() does",
                  *unknown.begin()));
}

int64_t bytes(const std::optional<double>& mib, int64_t otherwise) {
  return mib ? static_cast<int64_t>(*mib * kBytesPerMiB) : otherwise;
}

std::shared_ptr<c10d::Reducer> make_reducer(const DdpState& state) {
  const DdpOptions& options = state.options;
  const std::vector<at::Tensor> tensors = tensors_of(state.parameters);
  const auto sparse_parameters = state.module->sparse_parameters();
  std::vector<bool> sparse;
  std::unordered_map<size_t, std::string> names;
  for (const NamedTensor& parameter : state.parameters) {
    names[sparse.size()] = parameter.name;
    sparse.push_back(sparse_parameters.contains(parameter.tensor.unsafeGetTensorImpl()));
  }
  const int64_t cap = bytes(options.bucket_cap_mb, c10d::kDefaultBucketBytesCap);
  const int64_t first_cap = bytes(options.first_bucket_cap_mb,
                                  options.bucket_cap_mb ? cap : c10d::kDefaultFirstBucketBytes);
  // As in PyTorch, the first step has one bucket; then the reducer rebuilds the buckets in the
  // order in which gradients became ready. With find_unused_parameters that order may change: then
  // the first buckets are the final ones.
  std::vector<size_t> limits{std::numeric_limits<int64_t>::max()};
  if (state.searches_unused()) {
    limits = {static_cast<size_t>(first_cap)};
    if (first_cap != cap) limits.push_back(static_cast<size_t>(cap));
  }
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, limits, sparse));
  // Gradients become ready from the last layer to the first.
  std::reverse(buckets.begin(), buckets.end());
  return std::make_shared<c10d::Reducer>(
      tensors, std::move(buckets), state.group, std::move(sparse), cap,
      options.find_unused_parameters, options.gradient_as_bucket_view, std::move(names), first_cap,
      options.skip_all_reduce_unused_params, /*use_python_reducer=*/false, std::vector<int64_t>{});
}

/// Runs `allocate`, which allocates the reducer's buckets. Their memory is registered with NCCL if
/// the group's options ask for it.
void with_bucket_memory(const DdpState& state, c10::function_ref<void()> allocate) {
  Backend* const backend = backend_of(state.group);
  backend != nullptr ? backend->allocate_registered(allocate) : allocate();
}

void rebuild_buckets(const DdpState& state) {
  if (!state.reducer->should_rebuild_buckets()) return;
  with_bucket_memory(state, [&] { state.reducer->rebuild_buckets(); });
}

std::shared_ptr<c10d::Logger> make_logger(const DdpState& state) {
  auto logger = std::make_shared<c10d::Logger>(state.reducer);
  const at::Device device = state.first_device;
  logger->set_construction_data_and_log(
      state.module->class_name(),
      device.is_cuda() ? std::vector<int>{device.index()} : std::vector<int>{},
      device.is_cuda() ? device.index() : -1, state.options.broadcast_buffers,
      !state.module->sync_layers().empty(), state.options.static_graph);
  return logger;
}

/// @throws base::UserError unless the result of a communication hook is a tensor like the bucket's.
void check_hook_result(const std::string& hook, const c10::IValue& value,
                       const at::Tensor& bucket) {
  const auto describe = [](const at::Tensor& tensor) {
    return fmt::format("{} of {}", tensor.numel(), c10::toString(tensor.scalar_type()));
  };
  std::string returned;
  if (!value.isTensor() && !(value.isTensorList() && value.toTensorList().size() == 1)) {
    returned = value.tagKind() + " in place of a tensor";
  } else {
    const at::Tensor result = c10d::detail::parseCppCommHookResult(value);
    returned = result.defined() ? describe(result) : "an undefined tensor";
  }
  if (returned == describe(bucket)) return;
  throw base::UserError(fmt::format("the communication hook '{}' returned {}; the bucket has {}",
                                    hook, returned, describe(bucket)));
}

/// Adapts a user's function to c10d::Reducer.
class FunctionHook : public c10d::CommHookInterface {
 public:
  FunctionHook(CommHook hook, std::string name, std::shared_ptr<std::atomic<bool>> failed)
      : hook_(std::move(hook)), name_(std::move(name)), failed_(std::move(failed)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor expected = bucket.getBuffer();
    const auto recording_failure = [failed = failed_](const auto& body) {
      try {
        return body();
      } catch (...) {
        *failed = true;
        throw;
      }
    };
    return recording_failure([&] {
      const FuturePtr future = hook_(bucket);
      if (!future) {
        throw base::UserError(fmt::format("the communication hook '{}' returned no future", name_));
      }
      // Does not capture `this`: a bucket may complete after an exception has destroyed the
      // wrapper.
      return future->then(
          [recording_failure, name = name_, expected](c10::ivalue::Future& done) {
            return recording_failure([&]() -> c10::IValue {
              if (done.hasError()) std::rethrow_exception(done.exception_ptr());
              check_hook_result(name, done.constValue(), expected);
              return done.value();
            });
          },
          future->elementType());
    });
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const CommHook hook_;
  const std::string name_;
  const std::shared_ptr<std::atomic<bool>> failed_;
};

/// Replaces gradients that are views of the buckets by aliases that autograd does not regard as
/// views, because zero_grad() of torch::optim cannot detach views.
void hide_bucket_views(const DdpState& state) {
  for (const NamedTensor& parameter : state.parameters) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && gradient.is_view()) gradient = gradient.variable_data();
  }
}

/// Runs when the backward of the module begins.
/// @param exchanges whether this backward exchanges gradients.
void on_backward(const std::weak_ptr<DdpState>& weak, bool exchanges) {
  const auto state = weak.lock();
  if (!state) return;
  auto& engine = torch::autograd::Engine::get_default_engine();
  if (state->options.static_graph && exchanges && !state->had_first_backward) {
    state->had_first_backward = true;
    engine.queue_callback([state] { state->reducer->delay_all_reduce(); });
  }
  if (state->join && state->join->statistics) {
    engine.queue_callback([state] {
      if (state->join) state->join->statistics->end_backward();
    });
  }
  if (state->options.gradient_as_bucket_view) {
    // Queued from a callback, to run after the reducer's own callbacks.
    engine.queue_callback([state] {
      torch::autograd::Engine::get_default_engine().queue_callback(
          [state] { hide_bucket_views(*state); });
    });
  }
}

bool listens_to_backward(const DdpState& state) {
  return state.searches_unused() || (state.options.static_graph && !state.had_first_backward) ||
         state.options.gradient_as_bucket_view || (state.join && state.join->statistics);
}

}  // namespace

std::vector<NamedTensor> DdpState::shared_buffers() const {
  if (!options.broadcast_buffers) return {};
  return without(module->buffers(), ignored);
}

std::vector<at::Tensor> DdpState::buffers_to_sync() const {
  if (!sync_buffers_next) return {};
  return tensors_of(shared_buffers());
}

void DdpState::broadcast(const std::vector<at::Tensor>& tensors, int rank) const {
  if (tensors.empty() || group->getSize() == 1) return;
  // Aliases with their own version counters: overwriting a buffer must not invalidate a graph that
  // saved it (two forwards, then a backward).
  std::vector<at::Tensor> aliases;
  aliases.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) aliases.push_back(tensor.variable_data());
  c10d::broadcast_coalesced(group, aliases, kBroadcastBucketBytes, rank);
}

void DdpState::broadcast_module(int rank) const {
  std::vector<at::Tensor> all = tensors_of(without(module->parameters(), ignored));
  for (const NamedTensor& buffer : shared_buffers()) all.push_back(buffer.tensor);
  broadcast(all, rank);
}

DdpBase::DdpBase(std::shared_ptr<WrappedModule> module, const DdpOptions& options)
    : state_(std::make_shared<DdpState>()) {
  check_options(options);
  DdpState& state = *state_;
  state.module = std::move(module);
  state.options = options;
  state.group = options.process_group.get();
  state.ignored.insert(options.parameters_to_ignore.begin(), options.parameters_to_ignore.end());
  check_ignored(state);
  const auto considered = without(state.module->parameters(), state.ignored);
  std::partition_copy(considered.begin(), considered.end(), std::back_inserter(state.parameters),
                      std::back_inserter(state.frozen),
                      [](const NamedTensor& one) { return one.tensor.requires_grad(); });
  check_same_module(options, considered, state.shared_buffers(), state.group);
  if (state.parameters.empty()) {
    throw base::UserError(
        "DistributedDataParallel: the module has no parameter that requires a gradient; use it "
        "without a wrapper");
  }
  std::vector<at::Device> devices;
  for (const NamedTensor& one : considered) devices.push_back(one.tensor.device());
  state.first_device = devices.front();
  state.input_device = check_devices(devices);
  if (options.init_sync) {
    // PyTorch issues the same collectives here; Python ranks in the group wait for them.
    c10d::verify_params_across_processes(state.group, tensors_of(state.parameters), {});
    state.broadcast_module(0);
  }
  with_bucket_memory(state, [&] { state.reducer = make_reducer(state); });
  state.logger = make_logger(state);
  state.reducer->set_logger(state.logger);
  if (options.static_graph) state.reducer->set_static_graph();
  for (const NamedTensor& parameter : state.parameters) {
    state.accumulators.push_back(torch::autograd::impl::grad_accumulator(parameter.tensor).get());
  }
}

DdpBase::~DdpBase() = default;

void DdpBase::before_forward() {
  DdpState& state = *state_;
  const bool has_graph = at::GradMode::is_enabled();
  if (has_graph) {
    check_unchanged(state);
    if (*state.comm_hook_failed) {
      throw base::UserError(
          "DistributedDataParallel: the communication hook failed in an earlier step, whose "
          "gradients were not exchanged; fix the error that it reported, and wrap the module "
          "again");
    }
  }
  if (has_graph && state.requires_sync()) {
    state.logger->set_runtime_stats_and_log();
    state.reducer->prepare_for_forward();
  }
  const bool in_join = state.join && has_graph;
  if (in_join) notify_joined_ranks(state);
  try {
    if (has_graph) rebuild_buckets(state);
  } catch (const c10::Error& error) {
    explain_unfinished_reduction(error.what_without_backtrace(), state.parameters);
    throw;
  }
  if (state.join && !in_join) return;
  if (const auto buffers = state.buffers_to_sync(); !buffers.empty()) {
    state.broadcast(buffers, in_join ? highest_rank(state, true) : 0);
  }
  if (in_join) announce_whether_gradients_follow(state);
}

std::vector<at::Tensor> DdpBase::after_forward(std::vector<at::Tensor> outputs) {
  DdpState& state = *state_;
  const bool has_graph = at::GradMode::is_enabled();
  // As in PyTorch, the forward after one without exchange of gradients does not broadcast buffers.
  const bool exchanges = has_graph && state.requires_sync();
  const bool hidden_from_joined = state.join && !has_graph;
  if (!hidden_from_joined) state.sync_buffers_next = exchanges;
  if (!has_graph) return outputs;
  const bool backward_follows = std::any_of(
      outputs.begin(), outputs.end(), [](const at::Tensor& one) { return one.requires_grad(); });
  if (state.join && state.join->statistics) state.join->statistics->end_forward(backward_follows);
  if (listens_to_backward(state)) {
    // If the outputs use no parameter, an edge to one still shows the reducer this backward.
    const bool needs_anchor = state.searches_unused() && !reach_any(outputs, state.accumulators);
    outputs = join_outputs(
        std::move(outputs), needs_anchor ? state.parameters.front().tensor : at::Tensor(),
        [weak = std::weak_ptr(state_), exchanges] { on_backward(weak, exchanges); });
  }
  if (!exchanges) return outputs;
  if (state.searches_unused() && outputs.empty()) {
    throw base::UserError(
        "DistributedDataParallel: find_unused_parameters found no tensor in the output of "
        "forward; return tensors, or optionals, containers, pairs or tuples of tensors, or structs "
        "with for_each_tensor()");
  }
  state.reducer->prepare_for_backward(state.searches_unused() ? outputs
                                                              : std::vector<at::Tensor>());
  return outputs;
}

void DdpBase::average_next_backward(const std::vector<at::Tensor>& outputs) {
  DdpState& state = *state_;
  if (!state.requires_sync()) return;
  if (state.options.static_graph || state.join) {
    throw base::UserError(fmt::format(
        "DistributedDataParallel: {} cannot be combined with several forwards before a backward, "
        "as in PipelineParallel",
        state.join ? "join()" : "static_graph"));
  }
  state.logger->set_runtime_stats_and_log();
  state.reducer->prepare_for_forward();
  state.sync_buffers_next = true;
  state.reducer->prepare_for_backward(state.searches_unused() ? outputs
                                                              : std::vector<at::Tensor>());
}

void DdpBase::register_comm_hook(CommHook hook, const std::string& name) {
  DdpState& state = *state_;
  if (!hook) throw base::UserError("register_comm_hook: the hook is empty");
  if (state.has_comm_hook) {
    throw base::UserError(
        "register_comm_hook: a hook is registered already; DistributedDataParallel takes one");
  }
  state.has_comm_hook = true;
  state.logger->set_comm_hook(name);
  state.reducer->register_comm_hook(
      std::make_unique<FunctionHook>(std::move(hook), name, state.comm_hook_failed));
}

void DdpBase::zero_grad() {
  for (const NamedTensor& parameter : state_->parameters) {
    parameter.tensor.mutable_grad() = at::Tensor();
  }
}

DdpStats DdpBase::stats() const {
  c10::DDPLoggingData data = state_->logger->get_ddp_logging_data();
  auto& number = data.ints_map;  // missing values are 0
  const auto time = [&number](const char* key) { return std::chrono::nanoseconds(number[key]); };
  return {
      .iteration = number["iteration"],
      .forward_compute_time = time("avg_forward_compute_time"),
      .backward_compute_time = time("avg_backward_compute_time"),
      .backward_comm_time = time("avg_backward_comm_time"),
      .backward_compute_comm_overlap_time = time("avg_backward_compute_comm_overlap_time"),
      .num_parameter_tensors = number["num_parameter_tensors"],
      .total_parameter_size_bytes = number["total_parameter_size_bytes"],
      .unused_parameter_size_bytes = number["unused_parameter_size"],
      .bucket_sizes = state_->logger->get_bucket_sizes(),
      .has_rebuilt_buckets = number["has_rebuilt_buckets"] != 0,
      .can_set_static_graph = number["can_set_static_graph"] != 0,
      .comm_hook = data.strs_map["comm_hook"],
  };
}

std::optional<at::Device> DdpBase::input_device() const {
  return state_->input_device;
}

const ProcessGroupPtr& DdpBase::process_group() const {
  return state_->group;
}

NoSyncGuard DdpBase::no_sync() {
  return NoSyncGuard(state_);
}

}  // namespace detail

// A counter, because guards may end in any order.
NoSyncGuard::NoSyncGuard(std::shared_ptr<detail::DdpState> state) : state_(std::move(state)) {
  ++state_->no_sync_guards;
}

NoSyncGuard::~NoSyncGuard() {
  --state_->no_sync_guards;
}

}  // namespace syncbn::dist

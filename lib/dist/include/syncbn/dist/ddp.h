#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/tensor_tree.h>

namespace torch::jit {
struct Module;
}

namespace syncbn::dist {

/// Options of DistributedDataParallel, with the names and defaults of
/// torch.nn.parallel.DistributedDataParallel. There is no `device_ids` and no `output_device`: the
/// device is the module's.
struct DdpOptions {
  /// Overwrite every rank's buffers with rank 0's before each forward. This does not synchronise
  /// batch norm: see docs/buffers.md.
  bool broadcast_buffers = true;
  /// Allow parameters without a gradient in a step. Costs a walk over the graph per step, from the
  /// tensors in forward's output. Unlike in PyTorch, a rank may use no parameter at all: its
  /// outputs still require gradients, so that backward runs.
  bool find_unused_parameters = false;
  /// Make gradients views into the communication buckets: saves a copy, and memory of the size of
  /// the gradients. Zero them in place: after zero_grad(), which makes them undefined, the next
  /// step copies again.
  bool gradient_as_bucket_view = false;
  /// The first step determines which parameters are used, and every step uses the same. Allows
  /// activation checkpointing, and unused parameters without a search per step.
  bool static_graph = false;
  /// With find_unused_parameters: do not communicate a bucket without used parameters. The unused
  /// parameters must be the same on all ranks.
  bool skip_all_reduce_unused_params = false;
  /// Broadcast rank 0's parameters (and, with broadcast_buffers, buffers) when constructed.
  bool init_sync = true;
  /// Size of the gradient buckets in MiB; unset: 25.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// Size of the first bucket to communicate in MiB. A small one starts communication early in
  /// backward. Unset: bucket_cap_mb, or 1 if that is unset as well.
  std::optional<double> first_bucket_cap_mb = std::nullopt;
  /// Names of parameters and buffers to leave alone, as in named_parameters().
  std::vector<std::string> parameters_to_ignore = {};
  /// The ranks that share gradients; {}: the default group.
  GroupOrDefault process_group = {};
};

/// Options of DistributedDataParallel::join().
struct JoinOptions {
  /// True: divide gradients by the size of the group, so that every input has the same weight.
  /// False: by the number of ranks that still have input. A communication hook does its own
  /// division: the hooks of comm_hooks.h divide by the size of the group.
  bool divide_by_initial_world_size = true;
  /// False: join() does nothing.
  bool enable = true;
  /// When a rank runs out of input, forward throws EarlyTermination on the others.
  bool throw_on_early_termination = false;
};

/// Thrown with JoinOptions::throw_on_early_termination.
class EarlyTermination : public base::UserError {
 public:
  using UserError::UserError;
};

/// Measurements of c10d::Reducer as of the last sampled step: the first ten, then every hundredth.
/// Times are means over the sampled steps.
struct DdpStats {
  int64_t iteration = 0;  ///< steps before the latest forward
  std::chrono::nanoseconds forward_compute_time{0};
  std::chrono::nanoseconds backward_compute_time{0};
  std::chrono::nanoseconds backward_comm_time{0};
  std::chrono::nanoseconds backward_compute_comm_overlap_time{0};
  int64_t num_parameter_tensors = 0;
  int64_t total_parameter_size_bytes = 0;
  int64_t unused_parameter_size_bytes = 0;
  std::vector<int64_t> bucket_sizes;  ///< bytes, in the order of communication
  bool has_rebuilt_buckets = false;
  bool can_set_static_graph = false;  ///< as far as known
  std::string comm_hook;              ///< empty: none was registered
};

class NoSyncGuard;
class JoinGuard;

namespace detail {

class WrappedModule;
struct DdpState;

/// The compiled part of DistributedDataParallel, which does not depend on the module's type.
class DdpBase {
 public:
  DdpBase(const DdpBase&) = delete;
  DdpBase& operator=(const DdpBase&) = delete;

  /// For gradient accumulation. While the guard lives, backward adds up local gradients. The first
  /// backward after it averages the sums. Call forward, not only backward, while the guard lives.
  [[nodiscard]] NoSyncGuard no_sync();

  /// For schedules with several forwards, all under no_sync(), before their backwards: the next
  /// backward averages the sums of gradients. PipelineParallel calls it.
  /// @param outputs of the forward whose backward is next
  void average_next_backward(const std::vector<at::Tensor>& outputs);

  /// For ranks with different numbers of inputs: put the guard around the training loop.
  ///
  ///     {
  ///       auto guard = ddp.join();
  ///       for (const auto& batch : loader) train_step(batch);
  ///     }  // takes part in the other ranks' communication until none has input
  ///
  /// Afterwards all ranks have the parameters of a rank that ran out of input last, and with
  /// broadcast_buffers its buffers, otherwise its SyncBatchNorm layers' statistics. SyncBatchNorm
  /// layers work as if this rank had empty batches; they need one group with the ranks of this
  /// wrapper's group, but not that group itself. One backward follows each forward that builds a
  /// graph; a forward under NoGradGuard communicates nothing. Each step costs three small
  /// all-reduces, as in PyTorch. One guard per process.
  /// @throws base::UserError for nested use, for SyncBatchNorm layers over other ranks, and with
  ///   skip_all_reduce_unused_params.
  [[nodiscard]] JoinGuard join(const JoinOptions& options = {});

  /// Sets how a bucket's gradients are averaged. Call it once, before the first backward.
  /// @param name for stats()
  /// @throws base::UserError when a hook is registered already.
  void register_comm_hook(CommHook hook, const std::string& name = "user-defined");

  /// Makes the gradients undefined, except those of ignored parameters.
  void zero_grad();

  DdpStats stats() const;

  /// The group over which gradients are averaged.
  const ProcessGroupPtr& process_group() const;

 protected:
  DdpBase(std::shared_ptr<WrappedModule> module, const DdpOptions& options);
  ~DdpBase();

  void before_forward();
  /// Returns what the caller of forward gets in place of `outputs`.
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);
  /// The module's device; empty if it is on several.
  std::optional<at::Device> input_device() const;

 private:
  std::shared_ptr<DdpState> state_;  ///< autograd graphs have weak references to it
};

std::shared_ptr<WrappedModule> wrap(std::shared_ptr<torch::nn::Module> module);

}  // namespace detail

/// See DistributedDataParallel::no_sync.
class NoSyncGuard {
 public:
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;
  ~NoSyncGuard();

 private:
  friend class detail::DdpBase;
  explicit NoSyncGuard(std::shared_ptr<detail::DdpState> state);
  std::shared_ptr<detail::DdpState> state_;
};

/// See DistributedDataParallel::join.
class JoinGuard {
 public:
  JoinGuard(const JoinGuard&) = delete;
  JoinGuard& operator=(const JoinGuard&) = delete;
  /// Calls finish(), unless an exception is in flight. @throws what finish() throws.
  ~JoinGuard() noexcept(false);

  /// Takes part in the other ranks' communication until none has input.
  /// @throws base::UnavailableError when a peer fails; EarlyTermination if
  ///   throw_on_early_termination is set and others still have input.
  void finish();

 private:
  friend class detail::DdpBase;
  JoinGuard(std::shared_ptr<detail::DdpState> state, const JoinOptions& options);
  std::shared_ptr<detail::DdpState> state_;  ///< null if there is nothing to finish
  int exceptions_before_;
};

/// Averages gradients over the ranks of a process group during backward, overlapping communication
/// with computation (Li et al., arXiv:2006.15704; twin of torch.nn.parallel.DistributedDataParallel
/// with the same engine, c10d::Reducer).
///
///     DistributedDataParallel<NetImpl> ddp(net, {.broadcast_buffers = false});
///     auto loss = criterion(ddp(images), labels);
///     loss.backward();                      // ddp's gradients are now the mean over all ranks
///
/// Tensors among the arguments, also inside containers, are moved to the module's device. Outputs
/// may be tensors, and optionals, variants, pairs, tuples and containers of them. A struct of
/// tensors needs a member function template for_each_tensor(visit), which calls visit(member)
/// for each member with tensors. Every rank runs the same number of forwards and backwards (see
/// join()). Not thread-safe.
///
/// @throws base::UserError (constructor) when the module has no parameter that requires a gradient,
///   or its parameters differ between ranks in number or shape (naming both); (forward) when a
///   parameter got no gradient in the previous step and find_unused_parameters is off;
///   base::UnavailableError when a peer fails.
template <class Module>
class DistributedDataParallel : public detail::DdpBase {
 public:
  explicit DistributedDataParallel(std::shared_ptr<Module> module, const DdpOptions& options = {})
      : DdpBase(detail::wrap(module), options), module_(std::move(module)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module,
                                   const DdpOptions& options = {})
      : DistributedDataParallel(module.is_empty() ? nullptr : module.ptr(), options) {}

  template <class... Args>
  auto forward(Args&&... args) {
    return invoke(
        [](Module& module, auto&&... inputs) {
          return module.forward(std::forward<decltype(inputs)>(inputs)...);
        },
        std::forward<Args>(args)...);
  }

  /// forward() through another function of the module: `ddp.invoke(&NetImpl::logits, images)`.
  template <class Function, class... Args>
  auto invoke(Function&& function, Args&&... args) {
    before_forward();
    auto output = std::invoke(std::forward<Function>(function), *module_,
                              detail::to_device(std::forward<Args>(args), input_device())...);
    std::vector<at::Tensor> tensors;
    detail::for_each_tensor(output, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
    tensors = after_forward(std::move(tensors));
    auto next = tensors.begin();
    detail::for_each_tensor(output, [&](at::Tensor& tensor) { tensor = *next++; });
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  Module& module() { return *module_; }
  const std::shared_ptr<Module>& module_ptr() const { return module_; }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  std::shared_ptr<Module> module_;
};

/// DistributedDataParallel for a TorchScript module, such as one exported from Python:
///
///     torch::jit::Module net = torch::jit::load("net.pt");
///     DistributedDataParallel<torch::jit::Module> ddp(net);
///     at::Tensor scores = ddp(images).toTensor();
template <>
class DistributedDataParallel<torch::jit::Module> : public detail::DdpBase {
 public:
  explicit DistributedDataParallel(const torch::jit::Module& module,
                                   const DdpOptions& options = {});
  ~DistributedDataParallel();

  c10::IValue forward(std::vector<c10::IValue> inputs);
  template <class... Args>
  c10::IValue operator()(Args&&... args) {
    std::vector<c10::IValue> inputs;
    (inputs.emplace_back(std::forward<Args>(args)), ...);
    return forward(std::move(inputs));
  }

  torch::jit::Module& module() { return *module_; }
  void train(bool on = true);
  void eval() { train(false); }

 private:
  std::unique_ptr<torch::jit::Module> module_;
};

}  // namespace syncbn::dist

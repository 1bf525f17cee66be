#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// torch::nn::Module.
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

/// Options of DistributedDataParallel; the same names and defaults as
/// torch.nn.parallel.DistributedDataParallel. `device_ids` and `output_device` are not needed: the
/// device is the module's own.
struct DdpOptions {
  /// Before each forward, overwrite every rank's buffers by rank 0's. This does not make batch norm
  /// synchronised: see docs/buffers.md.
  bool broadcast_buffers = true;
  /// Some parameters may get no gradient in some step; costs a walk over the graph per step, which
  /// begins at the tensors found in forward's output. Unlike in PyTorch, a rank may use no
  /// parameter at all: its outputs then take a gradient nevertheless, so that backward runs.
  bool find_unused_parameters = false;
  /// Let gradients be views into the communication buckets: saves a copy, and memory of the size of
  /// the gradients. Zeroing them in place keeps it so; setting them to undefined, as zero_grad()
  /// does, costs the copy again in the next step.
  bool gradient_as_bucket_view = false;
  /// The same parameters are used, and unused, in every step: found out in the first one. Allows
  /// checkpointing of activations, and unused parameters without a search per step.
  bool static_graph = false;
  /// With find_unused_parameters: leave a bucket out of communication when none of its parameters
  /// was used on any rank. The unused parameters must be the same on all ranks.
  bool skip_all_reduce_unused_params = false;
  /// Broadcast rank 0's parameters (and, with broadcast_buffers, buffers) when constructed.
  bool init_sync = true;
  /// Size of the gradient buckets, MiB; unset: 25.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// Size of the bucket that is communicated first, MiB: small, so that communication starts early
  /// in backward; unset: bucket_cap_mb, or 1 when that is unset as well.
  std::optional<double> first_bucket_cap_mb = std::nullopt;
  /// Names of parameters and buffers, as in named_parameters(), that are left alone.
  std::vector<std::string> parameters_to_ignore = {};
  /// The ranks that share gradients; empty: the default group. Beware of the null pointer that
  /// new_group() returns on ranks outside the group.
  ProcessGroupPtr process_group = {};
};

/// Options of DistributedDataParallel::join().
struct JoinOptions {
  /// Divide gradients by the size of the group even when some ranks have run out of input: then
  /// every input has the same weight. False: by the number of ranks that still have some. A
  /// communication hook divides as it likes: those of comm_hooks.h by the size of the group.
  bool divide_by_initial_world_size = true;
  /// False: join() does nothing.
  bool enable = true;
  /// As soon as one rank runs out of input, end the others too, by an exception in forward.
  bool throw_on_early_termination = false;
};

/// Thrown on all ranks where JoinOptions::throw_on_early_termination asks for it.
class EarlyTermination : public base::UserError {
 public:
  using UserError::UserError;
};

/// What c10d's engine measured, as of the last sampled step: the first ten, then every hundredth.
/// Times are means over the sampled steps.
struct DdpStats {
  int64_t iteration = 0;  ///< steps before the latest forward
  std::chrono::nanoseconds forward_compute_time{0};
  std::chrono::nanoseconds backward_compute_time{0};
  std::chrono::nanoseconds backward_comm_time{0};
  /// How long both ran at once.
  std::chrono::nanoseconds backward_compute_comm_overlap_time{0};
  int64_t num_parameter_tensors = 0;
  int64_t total_parameter_size_bytes = 0;
  int64_t unused_parameter_size_bytes = 0;
  /// Bytes of each bucket, in the order of communication.
  std::vector<int64_t> bucket_sizes;
  bool has_rebuilt_buckets = false;
  /// Whether static_graph could have been set, as far as is known.
  bool can_set_static_graph = false;
  std::string comm_hook;  ///< empty: none was registered
};

class NoSyncGuard;
class JoinGuard;

namespace detail {

/// A module as DistributedDataParallel sees it, whatever its type.
class WrappedModule;
struct DdpState;

/// The compiled part of DistributedDataParallel: everything that does not depend on the module's
/// type, around c10d::Reducer.
class DdpBase {
 public:
  DdpBase(const DdpBase&) = delete;
  DdpBase& operator=(const DdpBase&) = delete;

  /// While the returned guard lives, backward accumulates gradients locally; the first backward
  /// after it averages the sum. For gradient accumulation. Forward belongs inside, too.
  [[nodiscard]] NoSyncGuard no_sync();

  /// For ranks with different numbers of inputs: put it around the training loop.
  ///
  ///     {
  ///       auto guard = ddp.join();
  ///       for (const auto& batch : loader) train_step(batch);
  ///     }  // waits here, and takes part in the others' communication, until all are through
  ///
  /// Then all ranks have the parameters (and, with broadcast_buffers or SyncBatchNorm layers, the
  /// buffers) of a rank that was the last. SyncBatchNorm layers work inside, as if this rank had
  /// empty batches, when they exchange over the ranks of this wrapper's group, but not over the
  /// very group. One backward follows each forward that builds a graph; a forward under
  /// NoGradGuard, as in an evaluation, communicates nothing. Each step costs three small
  /// all-reduces, as in PyTorch. One at a time in a process.
  /// @throws base::UserError for nested use, and for SyncBatchNorm layers over other ranks.
  [[nodiscard]] JoinGuard join(const JoinOptions& options = {});

  /// Replaces the way in which a bucket's gradients are averaged; once, before the first backward.
  /// @param name is shown in stats().
  /// @throws base::UserError when there is one already.
  void register_comm_hook(CommHook hook, const std::string& name = "user-defined");

  /// Drops the gradients of all parameters that are not ignored.
  void zero_grad();

  DdpStats stats() const;

 protected:
  DdpBase(std::shared_ptr<WrappedModule> module, const DdpOptions& options);
  ~DdpBase();

  void before_forward();
  /// Takes the outputs of forward and returns what the caller gets in their place.
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);
  /// Where inputs go; nothing for a module on several devices.
  std::optional<at::Device> input_device() const;

 private:
  std::shared_ptr<DdpState> state_;  ///< graphs refer to it, weakly
};

std::shared_ptr<WrappedModule> wrap(std::shared_ptr<torch::nn::Module> module);

}  // namespace detail

/// Turns gradient synchronisation off while it lives; see DistributedDataParallel::no_sync.
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

/// The span in which ranks may run out of input; see DistributedDataParallel::join.
class JoinGuard {
 public:
  JoinGuard(const JoinGuard&) = delete;
  JoinGuard& operator=(const JoinGuard&) = delete;
  /// finish(), unless an exception passes through.
  /// @throws what finish() does.
  ~JoinGuard() noexcept(false);

  /// This rank has no more input: takes part in the others' communication until none has.
  /// @throws base::UnavailableError when a peer fails; EarlyTermination when it was asked for and
  ///   others still had input.
  void finish();

 private:
  friend class detail::DdpBase;
  JoinGuard(std::shared_ptr<detail::DdpState> state, const JoinOptions& options);
  std::shared_ptr<detail::DdpState> state_;  ///< null: nothing is open
  int exceptions_before_;
};

/// Averages gradients over the ranks of a process group during backward, overlapping communication
/// with computation (Li et al., arXiv:2006.15704; twin of torch.nn.parallel.DistributedDataParallel
/// around the same engine, c10d::Reducer).
///
///     DistributedDataParallel<NetImpl> ddp(net, {.broadcast_buffers = false});
///     auto loss = criterion(ddp(images), labels);
///     loss.backward();                      // ddp's gradients are now the mean over all ranks
///
/// The device is the module's own; tensors among the arguments, also inside containers and structs,
/// are moved to it. Outputs may be tensors and optionals, variants, pairs, tuples, containers and
/// plain structs of them. Every rank runs the same number of forwards and backwards (see join()).
/// Not thread-safe.
///
/// @throws base::UserError (constructor) when the module has no parameter that requires a gradient,
///   its parameters differ between ranks in number or shape (naming both), or SyncBatchNorm layers
///   are in a module spread over several devices; (forward) when a parameter got no gradient in the
///   step before and find_unused_parameters is off; base::UnavailableError when a peer fails.
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
    before_forward();
    auto output = module_->forward(detail::to_device(std::forward<Args>(args), input_device())...);
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

/// The same for a module of TorchScript's, such as one exported from Python:
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

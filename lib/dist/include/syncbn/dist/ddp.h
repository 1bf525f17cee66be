#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// torch::nn::Module.
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist {

/// Options of DistributedDataParallel; the same names and defaults as
/// torch.nn.parallel.DistributedDataParallel.
struct DdpOptions {
  /// Before each forward, overwrite every rank's buffers by rank 0's.
  bool broadcast_buffers = true;
  /// Some parameters may get no gradient in some step; costs a walk over the graph per step, which
  /// begins at the tensors found in forward's output.
  bool find_unused_parameters = false;
  /// Let gradients be views into the communication buckets: one copy less. torch::optim's
  /// zero_grad() cannot handle such gradients: call zero_grad() of this wrapper.
  bool gradient_as_bucket_view = false;
  /// Broadcast rank 0's parameters and buffers when constructed.
  bool init_sync = true;
  /// Size of the gradient buckets, MiB; unset: 25, and the first bucket 1.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// The ranks that share gradients; empty: the default group. Beware of the null pointer that
  /// new_group() returns on ranks outside the group.
  ProcessGroupPtr process_group = {};
};

namespace detail {

/// The compiled part of DistributedDataParallel: everything that does not depend on the module's
/// type, around c10d::Reducer.
class DdpCore {
 public:
  DdpCore(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options);
  DdpCore(const DdpCore&) = delete;
  DdpCore& operator=(const DdpCore&) = delete;
  ~DdpCore();

  void before_forward();
  /// Takes the outputs of forward and returns what the caller gets in their place.
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);
  bool require_sync() const;
  void set_require_sync(bool on);
  void zero_grad();
  at::Device device() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls visit(tensor) for each defined tensor in a value: through optionals, containers, pairs and
// tuples. Other types hold none.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (std::is_convertible_v<const Value&, std::string_view>) {
    // text, such as the key of a map
  } else if constexpr (requires { value.has_value(), *value; }) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (requires { value.begin(), value.end(); }) {
    for (auto&& item : value) for_each_tensor(item, visit);
  } else if constexpr (requires { std::tuple_size<Value>::value; }) {
    std::apply([&visit](auto&... items) { (for_each_tensor(items, visit), ...); }, value);
  }
}

template <class T>
decltype(auto) to_device(T&& value, at::Device device) {
  if constexpr (std::is_same_v<std::decay_t<T>, at::Tensor>) {
    return value.defined() && value.device() != device ? value.to(device, /*non_blocking=*/true)
                                                       : at::Tensor(value);
  } else {
    return std::forward<T>(value);
  }
}

}  // namespace detail

/// Turns gradient synchronisation off while it lives; see DistributedDataParallel::no_sync.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(detail::DdpCore& core) : core_(core), before_(core.require_sync()) {
    core_.set_require_sync(false);
  }
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;
  ~NoSyncGuard() { core_.set_require_sync(before_); }

 private:
  detail::DdpCore& core_;
  bool before_;
};

/// Averages gradients over the ranks of a process group during backward, overlapping communication
/// with computation (Li et al., arXiv:2006.15704; twin of torch.nn.parallel.DistributedDataParallel
/// around the same engine, c10d::Reducer).
///
///     DistributedDataParallel<NetImpl> ddp(net, {.broadcast_buffers = false});
///     auto loss = criterion(ddp(images), labels);
///     loss.backward();                      // ddp's gradients are now the mean over all ranks
///
/// The device is the module's own, tensors among the arguments are moved to it. Outputs may be
/// tensors and optionals, pairs, tuples, vectors and maps of them. Every rank runs the same number
/// of forwards and backwards. Not thread-safe.
///
/// @throws base::UserError (constructor) when the module has no parameter that requires a gradient,
///   or its parameters differ between ranks in number or shape, naming both;
///   base::UnavailableError when a peer fails.
template <class Module>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(std::shared_ptr<Module> module, const DdpOptions& options = {})
      : module_(std::move(module)), core_(std::make_unique<detail::DdpCore>(module_, options)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module,
                                   const DdpOptions& options = {})
      : DistributedDataParallel(module.ptr(), options) {}

  template <class... Args>
  auto forward(Args&&... args) {
    core_->before_forward();
    auto output = module_->forward(detail::to_device(std::forward<Args>(args), core_->device())...);
    std::vector<at::Tensor> tensors;
    detail::for_each_tensor(output, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
    tensors = core_->after_forward(std::move(tensors));
    auto next = tensors.begin();
    detail::for_each_tensor(output, [&](at::Tensor& tensor) { tensor = *next++; });
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the returned guard lives, backward accumulates gradients locally; the first backward
  /// after it averages the sum. For gradient accumulation.
  [[nodiscard]] NoSyncGuard no_sync() { return NoSyncGuard(*core_); }

  /// Drops all gradients, also those that are views into buckets.
  void zero_grad() { core_->zero_grad(); }

  Module& module() { return *module_; }
  const std::shared_ptr<Module>& module_ptr() const { return module_; }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  std::shared_ptr<Module> module_;
  std::unique_ptr<detail::DdpCore> core_;
};

}  // namespace syncbn::dist

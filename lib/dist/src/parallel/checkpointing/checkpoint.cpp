#include <syncbn/dist/checkpoint.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <array>
#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "batch_norm/statistics_scopes.h"

namespace syncbn::dist {
namespace {

using Tensors = std::vector<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The states of the random number generators that a checkpointed function may use.
class RandomState {
 public:
  /// Saves the states of the CPU's generator and of those of the inputs' GPUs.
  explicit RandomState(const Tensors& inputs) {
    std::unordered_set<at::Device> devices;
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.is_cuda()) devices.insert(input.device());
    }
    save(at::detail::getDefaultCPUGenerator());
    for (const at::Device& device : devices) {
      save(at::globalContext().defaultGenerator(device));
    }
  }

  /// Sets these states and returns those that they replace.
  RandomState exchange() const {
    RandomState before;
    for (const auto& [generator, state] : states_) {
      before.save(generator);
      at::Generator target = generator;
      const std::lock_guard lock(target.mutex());
      target.set_state(state);
    }
    return before;
  }

 private:
  RandomState() = default;
  void save(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    at::Tensor state = generator.get_state();
    states_.emplace_back(std::move(generator), std::move(state));
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

class AutocastState {
 public:
  AutocastState() {
    for (Device& device : devices_) {
      device.enabled = at::autocast::is_autocast_enabled(device.type);
      device.dtype = at::autocast::get_autocast_dtype(device.type);
    }
  }
  void restore() const {
    for (const Device& device : devices_) {
      at::autocast::set_autocast_enabled(device.type, device.enabled);
      at::autocast::set_autocast_dtype(device.type, device.dtype);
    }
  }

 private:
  struct Device {
    at::DeviceType type;
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<Device, 2> devices_{Device{at::kCPU}, Device{at::kCUDA}};
};

/// Disables autocast's cache of cast parameters during its lifetime. Casts in the first run have no
/// graph; those in the recomputation would stay cached after the step changed the parameters.
class WithoutCastCache {
 public:
  WithoutCastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~WithoutCastCache() { at::autocast::set_autocast_cache_enabled(was_enabled_); }
  WithoutCastCache(const WithoutCastCache&) = delete;
  WithoutCastCache& operator=(const WithoutCastCache&) = delete;

 private:
  const bool was_enabled_ = at::autocast::is_autocast_cache_enabled();
};

/// The state that the recomputation needs besides the inputs.
struct Recorded : torch::CustomClassHolder {
  using Function = std::function<Tensors(const Tensors&)>;
  Recorded(Function function, const Tensors& inputs, const CheckpointOptions& options)
      : function(std::move(function)) {
    if (options.preserve_rng_state) random.emplace(inputs);
  }

  const Function function;
  std::optional<RandomState> random;
  AutocastState autocast;
  detail::StatisticsTape tape;
};

/// Runs the function with the recorded random and autocast states, then restores this thread's own.
Tensors recompute(Recorded& recorded, const Tensors& inputs) {
  struct Restore {
    explicit Restore(const Recorded& recorded) {
      if (recorded.random) random.emplace(recorded.random->exchange());
      recorded.autocast.restore();
    }
    ~Restore() {
      if (random) random->exchange();
      autocast.restore();
    }
    AutocastState autocast;
    std::optional<RandomState> random;
  } const restore(recorded);
  const at::AutoGradMode with_grad(true);
  const WithoutCastCache without_cache;
  const detail::TapeScope scope(recorded.tape, detail::TapeScope::Mode::kReplay);
  return recorded.function(inputs);
}

class CheckpointFunction : public torch::autograd::Function<CheckpointFunction> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               const c10::intrusive_ptr<Recorded>& recorded) {
    context->save_for_backward(inputs.vec());
    context->saved_data["recorded"] = c10::IValue::make_capsule(recorded);
    const WithoutCastCache without_cache;
    const detail::TapeScope scope(recorded->tape, detail::TapeScope::Mode::kRecord);
    return recorded->function(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw base::UserError(
          "checkpoint: gradients of gradients (create_graph=true) are not supported");
    }
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw base::UserError(
          "checkpoint: backward runs for all parameters inside; use backward() without a list of "
          "inputs, not torch::autograd::grad()");
    }
    const auto recorded =
        c10::static_intrusive_pointer_cast<Recorded>(context->saved_data["recorded"].toCapsule());
    Tensors inputs;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.defined() ? saved.detach().requires_grad_(saved.requires_grad())
                                       : saved);
    }
    const Tensors outputs = recompute(*recorded, inputs);
    if (outputs.size() != grad_outputs.size()) {
      throw base::UserError(fmt::format(
          "checkpoint: the function gave {} outputs at first and {} in the recomputation; "
          "it must do the same both times",
          grad_outputs.size(), outputs.size()));
    }
    Tensors roots;
    Tensors gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !grad_outputs[i].defined()) continue;
      roots.push_back(outputs[i]);
      gradients.push_back(grad_outputs[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
    variable_list result;
    for (const at::Tensor& input : inputs) {
      result.push_back(input.defined() ? input.grad() : at::Tensor());
    }
    result.emplace_back();
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options) {
  const bool has_gradient = std::ranges::any_of(
      inputs, [](const at::Tensor& input) { return input.defined() && input.requires_grad(); });
  if (!at::GradMode::is_enabled() || !has_gradient) return function(inputs);
  const auto recorded = c10::make_intrusive<Recorded>(std::move(function), inputs, options);
  return CheckpointFunction::apply(at::TensorList(inputs), recorded);
}

at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options) {
  const auto wrapped = [function = std::move(function)](const Tensors& inputs) {
    return Tensors{function(inputs[0])};
  };
  return checkpoint(wrapped, Tensors{input}, options)[0];
}

}  // namespace syncbn::dist

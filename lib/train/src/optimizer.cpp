#include <syncbn/train/optimizer.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <cmath>

namespace syncbn::train {
namespace {

constexpr double kLargestRate = 1e6;  // a typing error above

struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;

  static void describe(config::Schema<SgdOptions>& schema) {
    schema.field("lr", &SgdOptions::lr, "learning rate").above(0).at_most(kLargestRate);
    schema.field("momentum", &SgdOptions::momentum, "how much of the former update stays")
        .at_least(0)
        .below(1);
    schema.field("weight_decay", &SgdOptions::weight_decay, "L2 penalty")
        .at_least(0)
        .at_most(kLargestRate);
    schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
    schema.check([](const SgdOptions& options) -> std::optional<std::string> {
      if (options.nesterov && options.momentum == 0) return "nesterov needs a momentum above 0";
      return std::nullopt;
    });
  }
};

struct AdamwOptions {
  double lr = 1e-3;
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;

  static void describe(config::Schema<AdamwOptions>& schema) {
    schema.field("lr", &AdamwOptions::lr, "learning rate").above(0).at_most(kLargestRate);
    schema.field("betas", &AdamwOptions::betas, "decay of the two running averages")
        .length(2)
        .at_least(0)
        .below(1);
    schema.field("eps", &AdamwOptions::eps, "added to the denominator")
        .above(0)
        .at_most(kLargestRate);
    schema.field("weight_decay", &AdamwOptions::weight_decay, "decoupled from the gradient")
        .at_least(0)
        .at_most(kLargestRate);
  }
};

/// Parameters by name, and the tensors that an optimizer keeps for each.
class StatefulOptimizer : public Optimizer {
 public:
  explicit StatefulOptimizer(NamedTensors parameters) : parameters_(std::move(parameters)) {}

  OptimizerState state() const override { return state_; }

  void load(const OptimizerState& state) override {
    OptimizerState loaded;
    for (const auto& [name, tensors] : state) {
      const at::Tensor& parameter = find(name);
      for (const auto& [key, tensor] : tensors) {
        if (tensor.dim() > 0 && tensor.sizes() != parameter.sizes()) {
          throw base::UserError(fmt::format(
              "the optimizer's {} of parameter '{}' has shape [{}], the parameter [{}]", key, name,
              fmt::join(tensor.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
        }
        loaded[name][key] = tensor.dim() > 0 ? tensor.to(parameter.options(), false, /*copy=*/true)
                                             : tensor.clone();
      }
    }
    state_ = std::move(loaded);
  }

 protected:
  /// Calls `update(name, parameter, gradient)` for each parameter that has a gradient.
  template <class Update>
  void for_each(const Update& update) {
    const at::NoGradGuard no_grad;
    for (auto& [name, parameter] : parameters_) {
      if (parameter.grad().defined()) update(name, parameter, parameter.grad());
    }
  }

  OptimizerState state_;

 private:
  const at::Tensor& find(const std::string& name) const {
    for (const auto& [known, parameter] : parameters_) {
      if (known == name) return parameter;
    }
    throw base::UserError(
        fmt::format("the optimizer's state is of a parameter '{}' that this model lacks", name));
  }

  NamedTensors parameters_;
};

/// torch.optim.SGD, without dampening: v = momentum * v + g; p -= lr * v.
class Sgd : public StatefulOptimizer {
 public:
  Sgd(const SgdOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters), options_(options) {}

  double base_lr() const override { return options_.lr; }

  void step(double lr) override {
    for_each([&](const std::string& name, at::Tensor& parameter, const at::Tensor& gradient) {
      at::Tensor update = gradient;
      if (options_.weight_decay != 0) update = update.add(parameter, options_.weight_decay);
      if (options_.momentum != 0) update = with_momentum(name, update);
      parameter.add_(update, -lr);
    });
  }

 private:
  at::Tensor with_momentum(const std::string& name, const at::Tensor& gradient) {
    at::Tensor& velocity = state_[name]["momentum_buffer"];
    if (velocity.defined()) {
      velocity.mul_(options_.momentum).add_(gradient);
    } else {
      velocity = gradient.clone();
    }
    return options_.nesterov ? gradient.add(velocity, options_.momentum) : velocity;
  }

  SgdOptions options_;
};

/// torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).
class Adamw : public StatefulOptimizer {
 public:
  Adamw(const AdamwOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters), options_(options) {}

  double base_lr() const override { return options_.lr; }

  void step(double lr) override {
    const double beta1 = options_.betas[0];
    const double beta2 = options_.betas[1];
    for_each([&](const std::string& name, at::Tensor& parameter, const at::Tensor& gradient) {
      auto& state = state_[name];
      if (state.empty()) {
        state["step"] = at::zeros({}, at::kFloat);
        state["exp_avg"] = at::zeros_like(parameter);
        state["exp_avg_sq"] = at::zeros_like(parameter);
      }
      const double count = state["step"].add_(1).item<double>();
      const at::Tensor& mean = state["exp_avg"].lerp_(gradient, 1 - beta1);
      const at::Tensor& square =
          state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
      parameter.mul_(1 - lr * options_.weight_decay);
      const double correction = std::sqrt(1 - std::pow(beta2, count));
      const at::Tensor denominator = square.sqrt().div_(correction).add_(options_.eps);
      parameter.addcdiv_(mean, denominator, -lr / (1 - std::pow(beta1, count)));
    });
  }

 private:
  AdamwOptions options_;
};

OptimizerKind::Registry make_registry() {
  OptimizerKind::Registry registry;
  registry.add<SgdOptions>("sgd", "stochastic gradient descent, as torch.optim.SGD",
                           [](const SgdOptions& options, const NamedTensors& parameters) {
                             return std::make_unique<Sgd>(options, parameters);
                           });
  registry.add<AdamwOptions>("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW",
                             [](const AdamwOptions& options, const NamedTensors& parameters) {
                               return std::make_unique<Adamw>(options, parameters);
                             });
  return registry;
}

}  // namespace

OptimizerKind::Registry& OptimizerKind::registry() {
  static Registry registry = make_registry();
  return registry;
}

}  // namespace syncbn::train

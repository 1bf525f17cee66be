#include <syncbn/train/optimizer.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>

#include <cmath>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

template <class Options>
void describe_common(config::Schema<Options>& schema) {
  schema.field("lr", &Options::lr, "learning rate").above(0).at_most(kMaxRate);
  schema.field("fused", &Options::fused,
               "update in one pass over memory; false: operation by operation, which rounds as "
               "Python's default does");
}

struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool fused = true;

  static void describe(config::Schema<SgdOptions>& schema) {
    describe_common(schema);
    schema.field("momentum", &SgdOptions::momentum, "share of the previous update that is kept")
        .at_least(0)
        .below(1);
    schema.field("weight_decay", &SgdOptions::weight_decay, "L2 penalty").between(0, kMaxRate);
    schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
    schema.check([](const SgdOptions& options) -> std::optional<std::string> {
      if (options.nesterov && options.momentum == 0) return "nesterov needs a momentum above 0";
      return std::nullopt;
    });
  }
};

/// torch.optim.SGD without dampening: v = momentum * v + g; p -= lr * v.
class Sgd : public StatefulOptimizer {
 public:
  Sgd(const SgdOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(
            parameters,
            {.type = "sgd",
             .fused = options.fused,
             .keys = options.momentum == 0 ? std::vector<std::string>{}
                                           : std::vector<std::string>{"momentum_buffer"},
             .no_sparse = options.weight_decay == 0 ? "" : "set weight_decay to 0"}),
        options_(options) {}

  double base_lr() const override { return options_.lr; }

 protected:
  void update_fused(ParameterBatch& batch, double lr) override {
    // Never the first step: velocities start at 0, with the same result.
    at::_fused_sgd_(batch.parameters, batch.gradients, velocities(batch), options_.weight_decay,
                    options_.momentum, lr, /*dampening=*/0, options_.nesterov, /*maximize=*/false,
                    /*is_first_step=*/false);
  }

  void update_foreach(ParameterBatch& batch, double lr) override {
    ParameterBatch::Tensors updates = batch.gradients;
    if (options_.weight_decay != 0) {
      updates = at::_foreach_add(updates, batch.parameters, options_.weight_decay);
    }
    if (options_.momentum != 0) {
      for (at::Tensor& update : updates) {
        if (update.is_sparse()) update = update.to_dense();
      }
      const at::TensorList velocity = velocities(batch);
      at::_foreach_mul_(velocity, options_.momentum);
      at::_foreach_add_(velocity, updates);
      updates = options_.nesterov ? at::_foreach_add(updates, velocity, options_.momentum)
                                  : velocity.vec();
    }
    at::_foreach_add_(batch.parameters, updates, -lr);
  }

 private:
  static at::TensorList velocities(const ParameterBatch& batch) {
    return batch.state.empty() ? at::TensorList() : at::TensorList(batch.state[0]);
  }

  SgdOptions options_;
};

struct AdamwOptions {
  double lr = 1e-3;
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool fused = true;

  static void describe(config::Schema<AdamwOptions>& schema) {
    describe_common(schema);
    schema.field("betas", &AdamwOptions::betas, "decay of the two running averages")
        .length(2)
        .at_least(0)
        .below(1);
    schema.field("eps", &AdamwOptions::eps, "added to the denominator").above(0).at_most(kMaxRate);
    schema.field("weight_decay", &AdamwOptions::weight_decay, "decoupled from the gradient")
        .between(0, kMaxRate);
  }
};

/// torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).
class Adamw : public StatefulOptimizer {
 public:
  Adamw(const AdamwOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters, {.type = "adamw",
                                       .fused = options.fused,
                                       .keys = {"exp_avg", "exp_avg_sq"},
                                       .counts_steps = true,
                                       .no_sparse = "use sgd"}),
        options_(options) {}

  double base_lr() const override { return options_.lr; }

 protected:
  void update_fused(ParameterBatch& batch, double lr) override {
    const at::Tensor count =
        at::full({}, batch.steps, batch.parameters.front().options().dtype(at::kFloat));
    const ParameterBatch::Tensors counts(batch.parameters.size(), count);
    at::_fused_adamw_(batch.parameters, batch.gradients, batch.state[0], batch.state[1],
                      /*max_exp_avg_sqs=*/{}, counts, lr, beta1(), beta2(), options_.weight_decay,
                      options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }

  void update_foreach(ParameterBatch& batch, double lr) override {
    const at::TensorList mean = batch.state[0];
    const at::TensorList square = batch.state[1];
    const auto count = static_cast<double>(batch.steps);
    at::_foreach_mul_(batch.parameters, 1 - lr * options_.weight_decay);
    at::_foreach_lerp_(mean, batch.gradients, 1 - beta1());
    at::_foreach_mul_(square, beta2());
    at::_foreach_addcmul_(square, batch.gradients, batch.gradients, 1 - beta2());
    const ParameterBatch::Tensors denominators = at::_foreach_sqrt(square);
    at::_foreach_div_(denominators, std::sqrt(1 - std::pow(beta2(), count)));
    at::_foreach_add_(denominators, options_.eps);
    at::_foreach_addcdiv_(batch.parameters, mean, denominators,
                          -lr / (1 - std::pow(beta1(), count)));
  }

 private:
  double beta1() const { return options_.betas[0]; }
  double beta2() const { return options_.betas[1]; }

  AdamwOptions options_;
};

template <class Kind, class Options>
std::unique_ptr<Optimizer> make(const Options& options, const NamedTensors& parameters) {
  return std::make_unique<Kind>(options, parameters);
}

}  // namespace

OptimizerKind::Registry& OptimizerKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<SgdOptions>("sgd", "stochastic gradient descent, as torch.optim.SGD",
                         make<Sgd, SgdOptions>);
    made.add<AdamwOptions>("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW",
                           make<Adamw, AdamwOptions>);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train

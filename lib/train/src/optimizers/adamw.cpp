#include "optimizers/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>

#include "optimizers/optimizer_options.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

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
    at::_fused_adamw_(batch.parameters, batch.gradients, batch.memory[0], batch.memory[1],
                      /*max_exp_avg_sqs=*/{}, counts, lr, beta1(), beta2(), options_.weight_decay,
                      options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }

  void update_foreach(ParameterBatch& batch, double lr) override {
    const at::TensorList mean = batch.memory[0];
    const at::TensorList square = batch.memory[1];
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

}  // namespace

void AdamwOptions::describe(config::Schema<AdamwOptions>& schema) {
  describe_common(schema);
  schema.field("betas", &AdamwOptions::betas, "decay of the two running averages")
      .length(2)
      .at_least(0)
      .below(1);
  schema.field("eps", &AdamwOptions::eps, "added to the denominator").above(0).at_most(kMaxRate);
  schema.field("weight_decay", &AdamwOptions::weight_decay, "decoupled from the gradient")
      .at_least(0)
      .at_most(kMaxRate);
}

std::unique_ptr<Optimizer> make_adamw(const AdamwOptions& options, const NamedTensors& parameters) {
  return std::make_unique<Adamw>(options, parameters);
}

}  // namespace syncbn::train

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <syncbn/config/schema.h>

#include <cmath>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct AdamOptions : CommonOptions {
  AdamOptions() { lr = 1e-3; }
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
  bool fused = true;

  template <class Options>
  static void describe_adam(config::Schema<Options>& schema, const std::string& weight_decay_help) {
    CommonOptions::describe(schema, weight_decay_help);
    schema.field("betas", &Options::betas, "decay of the two running averages")
        .length(2)
        .at_least(0)
        .below(1);
    schema.field("eps", &Options::eps, "added to the denominator").above(0).at_most(kMaxRate);
    describe_fused(schema);
  }
  static void describe(config::Schema<AdamOptions>& schema) { describe_adam(schema, "L2 penalty"); }
};

struct AdamwOptions : AdamOptions {
  AdamwOptions() { weight_decay = 1e-2; }
  static void describe(config::Schema<AdamwOptions>& schema) {
    describe_adam(schema, "decoupled from the gradient");
  }
};

/// torch.optim.Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter,
/// arXiv:1711.05101), which takes the weight decay out of the gradient.
template <bool kDecoupled>
class Adam : public StatefulOptimizer {
 public:
  Adam(const AdamOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters, options,
                          {.type = kDecoupled ? "adamw" : "adam",
                           .fused = options.fused,
                           .keys = {"exp_avg", "exp_avg_sq"},
                           .counts_steps = true,
                           .no_sparse = "use sgd"}),
        options_(options) {}

 protected:
  void update_fused(ParameterBatch& batch, const std::optional<at::Tensor>& found_inf) override {
    const auto update = [&](const auto& kernel) {
      kernel(batch.parameters, batch.gradients, batch.state[0], batch.state[1],
             /*max_exp_avg_sqs=*/at::TensorList(), batch.counts, batch.lr, beta1(), beta2(),
             batch.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false,
             /*grad_scale=*/std::nullopt, found_inf);
    };
    using Kernel =
        void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                 at::TensorList, double, double, double, double, double, bool, bool,
                 const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
    update(kDecoupled ? static_cast<Kernel>(at::_fused_adamw_)
                      : static_cast<Kernel>(at::_fused_adam_));
  }

  void update_foreach(ParameterBatch& batch) override {
    const at::TensorList mean = batch.state[0];
    const at::TensorList square = batch.state[1];
    ParameterBatch::Tensors gradients = batch.gradients;
    if (kDecoupled) {
      at::_foreach_mul_(batch.parameters, 1 - batch.lr * batch.weight_decay);
    } else if (batch.weight_decay != 0) {
      gradients = at::_foreach_add(gradients, batch.parameters, batch.weight_decay);
    }
    at::_foreach_lerp_(mean, gradients, 1 - beta1());
    at::_foreach_mul_(square, beta2());
    at::_foreach_addcmul_(square, gradients, gradients, 1 - beta2());
    const ParameterBatch::Tensors denominators = at::_foreach_sqrt(square);
    at::_foreach_div_(denominators, std::sqrt(1 - std::pow(beta2(), batch.steps)));
    at::_foreach_add_(denominators, options_.eps);
    at::_foreach_addcdiv_(batch.parameters, mean, denominators,
                          -batch.lr / (1 - std::pow(beta1(), batch.steps)));
  }

 private:
  double beta1() const { return options_.betas[0]; }
  double beta2() const { return options_.betas[1]; }

  AdamOptions options_;
};

}  // namespace

void add_adam(OptimizerKind::Registry& registry) {
  registry.add<AdamOptions>("adam", "Adam, as torch.optim.Adam",
                            make_optimizer<Adam<false>, AdamOptions>);
  registry.add<AdamwOptions>("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW",
                             make_optimizer<Adam<true>, AdamwOptions>);
}

}  // namespace syncbn::train

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <cmath>

#include "optimizers/kinds.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct AdamOptions : CommonOptions {
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
  bool amsgrad = false;
  bool fused = true;

  static void describe(config::Schema<AdamOptions>& schema) { describe_all(schema, "L2 penalty"); }

 protected:
  template <class Options>
  static void describe_all(config::Schema<Options>& schema, const std::string& weight_decay) {
    describe_common(schema, weight_decay);
    describe_betas(schema);
    describe_eps(schema);
    schema.field("amsgrad", &Options::amsgrad,
                 "divide by the largest of the past averages of the squared gradient");
    describe_fused(schema);
  }
};

struct AdamwOptions : AdamOptions {
  AdamwOptions() { weight_decay = 1e-2; }

  static void describe(config::Schema<AdamwOptions>& schema) {
    describe_all(schema, "decay of the parameters, apart from the gradient");
  }
};

/// torch.optim.Adam (Kingma and Ba, arXiv:1412.6980) and, with decoupled weight decay,
/// torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).
class Adam : public StatefulOptimizer {
 public:
  /// AdamW.
  Adam(const AdamwOptions& options, const NamedTensors& parameters)
      : Adam(options, parameters, /*is_decoupled=*/true) {}
  /// Adam, unless is_decoupled.
  Adam(const AdamOptions& options, const NamedTensors& parameters, bool is_decoupled = false)
      : StatefulOptimizer(options, parameters,
                          {.type = is_decoupled ? "adamw" : "adam",
                           .fused = options.fused,
                           .keys = keys(options),
                           .counts_steps = true}),
        options_(options),
        is_decoupled_(is_decoupled) {}

 protected:
  void update_fused(ParameterBatch& batch) override {
    const auto call = [&](const auto& update) {
      update(batch.parameters, batch.gradients, batch.state[0], batch.state[1], largest(batch),
             batch.counts, batch.lr, beta1(), beta2(), batch.weight_decay, options_.eps,
             options_.amsgrad, /*maximize=*/false, /*grad_scale=*/std::nullopt, batch.found_inf);
    };
    // In lambdas, since the operators are overloaded.
    if (is_decoupled_) {
      call([](const auto&... all) { at::_fused_adamw_(all...); });
    } else {
      call([](const auto&... all) { at::_fused_adam_(all...); });
    }
  }

  void update_foreach(ParameterBatch& batch) override {
    ParameterBatch::Tensors gradients = batch.gradients;
    if (is_decoupled_) {
      if (batch.weight_decay != 0) {
        at::_foreach_mul_(batch.parameters, 1 - batch.lr * batch.weight_decay);
      }
    } else {
      gradients = batch.decayed_gradients();
    }
    const at::TensorList mean = batch.state[0];
    at::TensorList square = batch.state[1];
    at::_foreach_lerp_(mean, gradients, 1 - beta1());
    at::_foreach_mul_(square, beta2());
    at::_foreach_addcmul_(square, gradients, gradients, 1 - beta2());
    if (options_.amsgrad) {
      at::_foreach_maximum_(largest(batch), square);
      square = largest(batch);
    }
    const ParameterBatch::Tensors denominators = at::_foreach_sqrt(square);
    // pow() as in Python's implementation: sqrt() may round differently.
    at::_foreach_div_(denominators, by_count(batch, [&](double count) {
                        return std::pow(1 - std::pow(beta2(), count), 0.5);
                      }));
    at::_foreach_add_(denominators, options_.eps);
    at::_foreach_addcdiv_(batch.parameters, mean, denominators, by_count(batch, [&](double count) {
                            return -(batch.lr / (1 - std::pow(beta1(), count)));
                          }));
  }

 private:
  static std::vector<std::string> keys(const AdamOptions& options) {
    if (options.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }

  static at::TensorList largest(const ParameterBatch& batch) {
    return batch.state.size() < 3 ? at::TensorList() : at::TensorList(batch.state[2]);
  }

  double beta1() const { return options_.betas[0]; }
  double beta2() const { return options_.betas[1]; }

  AdamOptions options_;
  bool is_decoupled_;
};

}  // namespace

void add_adam(OptimizerKind::Registry& registry) {
  registry.add<AdamOptions>("adam", "Adam, as torch.optim.Adam", make_optimizer<Adam, AdamOptions>);
  registry.add<AdamwOptions>("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW",
                             make_optimizer<Adam, AdamwOptions>);
}

}  // namespace syncbn::train

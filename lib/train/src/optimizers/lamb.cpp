#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "optimizers/kinds.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct LambOptions : CommonOptions {
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-6;
  std::optional<double> max_grad_norm;
  bool trust_clip = false;
  bool always_adapt = false;

  LambOptions() { weight_decay = 0.01; }

  static void describe(config::Schema<LambOptions>& schema) {
    describe_common(schema, "decay of the parameters, apart from the gradient");
    describe_betas(schema);
    describe_eps(schema);
    schema
        .field("max_grad_norm", &LambOptions::max_grad_norm,
               "gradients of a larger norm, over all parameters, are scaled down to it; null: no "
               "limit")
        .positive_up_to(kMaxRate);
    schema.field("trust_clip", &LambOptions::trust_clip, "limit the trust ratio to 1");
    schema.field("always_adapt", &LambOptions::always_adapt,
                 "also scale the updates of parameters without weight decay");
  }
};

/// LAMB (You et al., arXiv:1904.00962), with the options of timm's Lamb. By default it does
/// not clip gradients, which the trainer can do.
class Lamb : public StatefulOptimizer {
 public:
  Lamb(const LambOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(options, parameters,
                          {.type = "lamb",
                           .fused = false,
                           .keys = {"exp_avg", "exp_avg_sq"},
                           .counts_steps = true}),
        options_(options) {}

 protected:
  void prepare(std::vector<ParameterBatch>& batches) override {
    if (!options_.max_grad_norm || batches.empty()) return;
    const at::Device device = batches.front().parameters.front().device();
    ParameterBatch::Tensors norms;
    for (const ParameterBatch& batch : batches) {
      for (const at::Tensor& norm : at::_foreach_norm(batch.gradients)) {
        norms.push_back(norm.to(device, at::kDouble));
      }
    }
    const at::Tensor excess = at::stack(norms).norm() / *options_.max_grad_norm;
    const at::Tensor divisor = excess.clamp_min(1);
    for (ParameterBatch& batch : batches) {
      batch.gradients = at::_foreach_div(batch.gradients, like_first(divisor, batch));
    }
  }

  void update_foreach(ParameterBatch& batch) override {
    const double beta1 = options_.betas[0];
    const double beta2 = options_.betas[1];
    const at::TensorList mean = batch.state[0];
    const at::TensorList square = batch.state[1];
    at::_foreach_lerp_(mean, batch.gradients, 1 - beta1);
    at::_foreach_mul_(square, beta2);
    at::_foreach_addcmul_(square, batch.gradients, batch.gradients, 1 - beta2);
    const ParameterBatch::Tensors denominators = at::_foreach_sqrt(square);
    at::_foreach_div_(denominators, by_count(batch, [&](double count) {
                        return std::sqrt(1 - std::pow(beta2, count));
                      }));
    at::_foreach_add_(denominators, options_.eps);
    const ParameterBatch::Tensors updates = at::_foreach_div(
        mean, by_count(batch, [&](double count) { return 1 - std::pow(beta1, count); }));
    at::_foreach_div_(updates, denominators);
    if (batch.weight_decay != 0) at::_foreach_add_(updates, batch.parameters, batch.weight_decay);
    if (batch.weight_decay != 0 || options_.always_adapt) {
      at::_foreach_mul_(updates, trust_ratios(batch.parameters, updates));
    }
    at::_foreach_add_(batch.parameters, updates, -batch.lr);
  }

 private:
  static at::Tensor like_first(const at::Tensor& scalar, const ParameterBatch& batch) {
    const at::Tensor& first = batch.parameters.front();
    return scalar.to(first.device(), first.scalar_type());
  }

  /// |p| / |update|, or 1 where one of them is 0.
  ParameterBatch::Tensors trust_ratios(at::TensorList parameters, at::TensorList updates) const {
    const at::Tensor weights = at::stack(at::_foreach_norm(parameters));
    const at::Tensor sizes = at::stack(at::_foreach_norm(updates));
    const at::Tensor one = at::ones_like(weights);
    at::Tensor ratios = at::where(weights.gt(0).logical_and(sizes.gt(0)), weights / sizes, one);
    if (options_.trust_clip) ratios = at::minimum(ratios, one);
    return ratios.unbind();
  }

  LambOptions options_;
};

}  // namespace

void add_lamb(OptimizerKind::Registry& registry) {
  registry.add<LambOptions>("lamb", "LAMB, for large batches (arXiv:1904.00962)",
                            make_optimizer<Lamb, LambOptions>);
}

}  // namespace syncbn::train

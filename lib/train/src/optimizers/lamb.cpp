#include <ATen/Functions.h>
#include <syncbn/config/schema.h>

#include <cmath>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct LambOptions : CommonOptions {
  LambOptions() { lr = 1e-3, weight_decay = 1e-2; }
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-6;
  bool trust_clip = false;

  static void describe(config::Schema<LambOptions>& schema) {
    CommonOptions::describe(schema,
                            "added to the update; without it, a parameter's update is Adam's");
    schema.field("betas", &LambOptions::betas, "decay of the two running averages")
        .length(2)
        .at_least(0)
        .below(1);
    schema.field("eps", &LambOptions::eps, "added to the denominator").above(0).at_most(kMaxRate);
    schema.field("trust_clip", &LambOptions::trust_clip, "limit the trust ratio to 1");
  }
};

/// LAMB (You et al., arXiv:1904.00962), as Apex's FusedLAMB and timm's Lamb without their clipping
/// of gradients: Adam's update, scaled for each parameter by the ratio of the norms of parameter
/// and update. Parameters without weight decay keep Adam's scale.
class Lamb : public StatefulOptimizer {
 public:
  Lamb(const LambOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters, options,
                          {.type = "lamb",
                           .keys = {"exp_avg", "exp_avg_sq"},
                           .counts_steps = true,
                           .no_sparse = "use sgd"}),
        options_(options) {}

 protected:
  void update_foreach(ParameterBatch& batch) override {
    const at::TensorList mean = batch.state[0];
    const at::TensorList square = batch.state[1];
    const double beta1 = options_.betas[0];
    const double beta2 = options_.betas[1];
    at::_foreach_mul_(mean, beta1);
    at::_foreach_add_(mean, batch.gradients, 1 - beta1);
    at::_foreach_mul_(square, beta2);
    at::_foreach_addcmul_(square, batch.gradients, batch.gradients, 1 - beta2);
    const ParameterBatch::Tensors denominators = at::_foreach_sqrt(square);
    at::_foreach_div_(denominators, std::sqrt(1 - std::pow(beta2, batch.steps)));
    at::_foreach_add_(denominators, options_.eps);
    const ParameterBatch::Tensors updates = at::_foreach_div(mean, denominators);
    at::_foreach_div_(updates, 1 - std::pow(beta1, batch.steps));
    if (batch.weight_decay != 0) {
      at::_foreach_add_(updates, batch.parameters, batch.weight_decay);
      at::_foreach_mul_(updates, trust_ratios(batch.parameters, updates));
    }
    at::_foreach_add_(batch.parameters, updates, -batch.lr);
  }

 private:
  /// 1 where a norm is 0.
  ParameterBatch::Tensors trust_ratios(const ParameterBatch::Tensors& parameters,
                                       const ParameterBatch::Tensors& updates) const {
    const at::Tensor of_parameters = at::stack(at::_foreach_norm(parameters, 2));
    const at::Tensor of_updates = at::stack(at::_foreach_norm(updates, 2));
    const at::Tensor both = (of_parameters > 0).logical_and(of_updates > 0);
    at::Tensor ratios = at::where(both, of_parameters / of_updates, at::ones_like(of_updates));
    if (options_.trust_clip) ratios.clamp_max_(1);
    return ratios.unbind();
  }

  LambOptions options_;
};

}  // namespace

void add_lamb(OptimizerKind::Registry& registry) {
  registry.add<LambOptions>("lamb",
                            "Adam with a trust ratio for large batches, as Apex's FusedLAMB",
                            make_optimizer<Lamb, LambOptions>);
}

}  // namespace syncbn::train

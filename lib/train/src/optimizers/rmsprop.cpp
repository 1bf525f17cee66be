#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <syncbn/config/schema.h>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct RmspropOptions : CommonOptions {
  RmspropOptions() { lr = 1e-2; }
  double alpha = 0.99;
  double eps = 1e-8;
  double momentum = 0;
  bool centered = false;

  static void describe(config::Schema<RmspropOptions>& schema) {
    CommonOptions::describe(schema, "L2 penalty");
    schema.field("alpha", &RmspropOptions::alpha, "decay of the running average of squares")
        .at_least(0)
        .below(1);
    schema.field("eps", &RmspropOptions::eps, "added to the denominator")
        .above(0)
        .at_most(kMaxRate);
    schema.field("momentum", &RmspropOptions::momentum, "share of the previous update that is kept")
        .at_least(0)
        .below(1);
    schema.field("centered", &RmspropOptions::centered,
                 "divide by the deviation from the mean gradient");
  }
};

/// torch.optim.RMSprop (Tieleman and Hinton, 2012; centered: Graves, arXiv:1308.0850).
class Rmsprop : public StatefulOptimizer {
 public:
  Rmsprop(const RmspropOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(parameters, options,
                          {.type = "rmsprop",
                           .keys = {"square_avg", "momentum_buffer", "grad_avg"},
                           .counts_steps = true,
                           .no_sparse = "use sgd"}),
        options_(options) {}

 protected:
  void update_foreach(ParameterBatch& batch) override {
    const at::TensorList square = batch.state[0];
    const at::TensorList velocity = batch.state[1];
    const at::TensorList mean = batch.state[2];
    ParameterBatch::Tensors gradients = batch.gradients;
    if (batch.weight_decay != 0) {
      gradients = at::_foreach_add(gradients, batch.parameters, batch.weight_decay);
    }
    at::_foreach_mul_(square, options_.alpha);
    at::_foreach_addcmul_(square, gradients, gradients, 1 - options_.alpha);
    ParameterBatch::Tensors denominators;
    if (options_.centered) {
      at::_foreach_lerp_(mean, gradients, 1 - options_.alpha);
      denominators = at::_foreach_addcmul(square, mean, mean, -1);
      at::_foreach_sqrt_(denominators);
    } else {
      denominators = at::_foreach_sqrt(square);
    }
    at::_foreach_add_(denominators, options_.eps);
    if (options_.momentum == 0) {
      at::_foreach_addcdiv_(batch.parameters, gradients, denominators, -batch.lr);
      return;
    }
    at::_foreach_mul_(velocity, options_.momentum);
    at::_foreach_addcdiv_(velocity, gradients, denominators);
    at::_foreach_add_(batch.parameters, velocity, -batch.lr);
  }

 private:
  RmspropOptions options_;
};

}  // namespace

void add_rmsprop(OptimizerKind::Registry& registry) {
  registry.add<RmspropOptions>("rmsprop", "RMSprop, as torch.optim.RMSprop",
                               make_optimizer<Rmsprop, RmspropOptions>);
}

}  // namespace syncbn::train

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>

#include "optimizers/kinds.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct RmspropOptions : CommonOptions {
  double alpha = 0.99;
  double eps = 1e-8;
  double momentum = 0;
  bool centered = false;

  RmspropOptions() { lr = 1e-2; }

  static void describe(config::Schema<RmspropOptions>& schema) {
    describe_common(schema, "L2 penalty");
    schema.field("alpha", &RmspropOptions::alpha, "decay of the running averages").fraction();
    describe_eps(schema);
    describe_momentum(schema);
    schema.field("centered", &RmspropOptions::centered,
                 "divide by an estimate of the standard deviation");
  }
};

/// torch.optim.RMSprop (Hinton's lecture; Graves, arXiv:1308.0850, with centered).
class Rmsprop : public StatefulOptimizer {
 public:
  Rmsprop(const RmspropOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(options, parameters,
                          {.type = "rmsprop", .fused = false, .keys = keys(options)}),
        options_(options) {}

 protected:
  void update_foreach(ParameterBatch& batch) override {
    const ParameterBatch::Tensors gradients = batch.decayed_gradients();
    const at::TensorList square = batch.state[0];
    at::_foreach_mul_(square, options_.alpha);
    at::_foreach_addcmul_(square, gradients, gradients, 1 - options_.alpha);
    const ParameterBatch::Tensors denominators = roots(batch, gradients);
    at::_foreach_add_(denominators, options_.eps);
    if (options_.momentum == 0) {
      at::_foreach_addcdiv_(batch.parameters, gradients, denominators, -batch.lr);
      return;
    }
    const at::TensorList velocity = batch.state.back();
    at::_foreach_mul_(velocity, options_.momentum);
    at::_foreach_addcdiv_(velocity, gradients, denominators);
    at::_foreach_add_(batch.parameters, velocity, -batch.lr);
  }

 private:
  static std::vector<std::string> keys(const RmspropOptions& options) {
    std::vector<std::string> keys = {"square_avg"};
    if (options.centered) keys.push_back("grad_avg");
    if (options.momentum != 0) keys.push_back("momentum_buffer");
    return keys;
  }

  ParameterBatch::Tensors roots(const ParameterBatch& batch, at::TensorList gradients) const {
    const at::TensorList square = batch.state[0];
    if (!options_.centered) return at::_foreach_sqrt(square);
    const at::TensorList mean = batch.state[1];
    at::_foreach_lerp_(mean, gradients, 1 - options_.alpha);
    ParameterBatch::Tensors variance = at::_foreach_addcmul(square, mean, mean, -1);
    at::_foreach_sqrt_(variance);
    return variance;
  }

  RmspropOptions options_;
};

}  // namespace

void add_rmsprop(OptimizerKind::Registry& registry) {
  registry.add<RmspropOptions>("rmsprop", "RMSprop, as torch.optim.RMSprop",
                               make_optimizer<Rmsprop, RmspropOptions>);
}

}  // namespace syncbn::train

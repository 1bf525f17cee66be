#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>

#include "optimizers/kinds.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct SgdOptions : CommonOptions {
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool fused = true;

  SgdOptions() { lr = 0.1; }

  static void describe(config::Schema<SgdOptions>& schema) {
    describe_common(schema, "L2 penalty");
    describe_momentum(schema);
    schema
        .field("dampening", &SgdOptions::dampening,
               "share of the gradient that is left out of the momentum")
        .between(0, 1);
    schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
    describe_fused(schema);
    schema.refuse("nesterov needs a momentum above 0 and no dampening",
                  [](const SgdOptions& options) {
                    return options.nesterov && (options.momentum == 0 || options.dampening != 0);
                  });
  }
};

/// torch.optim.SGD: v = momentum * v + (1 - dampening) * g, and v = g in the first step;
/// p -= lr * v.
class Sgd : public StatefulOptimizer {
 public:
  Sgd(const SgdOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(
            options, parameters,
            {.type = "sgd",
             .fused = options.fused,
             .keys = options.momentum == 0 ? std::vector<std::string>{}
                                           : std::vector<std::string>{"momentum_buffer"},
             // Without dampening, velocities that start at 0 give the same result.
             .first_step_differs = options.momentum != 0 && options.dampening != 0,
             .sparse = Sparse::kWithoutWeightDecay}),
        options_(options) {}

 protected:
  void update_fused(ParameterBatch& batch) override {
    at::_fused_sgd_(batch.parameters, batch.gradients, velocities(batch), batch.weight_decay,
                    options_.momentum, batch.lr, options_.dampening, options_.nesterov,
                    /*maximize=*/false, batch.is_first_step, /*grad_scale=*/{}, batch.found_inf);
  }

  void update_foreach(ParameterBatch& batch) override {
    ParameterBatch::Tensors updates = batch.decayed_gradients();
    if (options_.momentum != 0) {
      for (at::Tensor& update : updates) {
        if (update.is_sparse()) update = update.to_dense();
      }
      const at::TensorList velocity = velocities(batch);
      if (batch.is_first_step) {
        at::_foreach_copy_(velocity, updates);
      } else {
        at::_foreach_mul_(velocity, options_.momentum);
        at::_foreach_add_(velocity, updates, 1 - options_.dampening);
      }
      updates = options_.nesterov ? at::_foreach_add(updates, velocity, options_.momentum)
                                  : velocity.vec();
    }
    at::_foreach_add_(batch.parameters, updates, -batch.lr);
  }

 private:
  static at::TensorList velocities(const ParameterBatch& batch) {
    return batch.state.empty() ? at::TensorList() : at::TensorList(batch.state[0]);
  }

  SgdOptions options_;
};

}  // namespace

void add_sgd(OptimizerKind::Registry& registry) {
  registry.add<SgdOptions>("sgd", "stochastic gradient descent, as torch.optim.SGD",
                           make_optimizer<Sgd, SgdOptions>);
}

}  // namespace syncbn::train

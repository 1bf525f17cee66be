#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <syncbn/config/schema.h>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

struct SgdOptions : CommonOptions {
  double momentum = 0;
  bool nesterov = false;
  bool fused = true;

  static void describe(config::Schema<SgdOptions>& schema) {
    CommonOptions::describe(schema, "L2 penalty");
    schema.field("momentum", &SgdOptions::momentum, "share of the previous update that is kept")
        .at_least(0)
        .below(1);
    schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
    describe_fused(schema);
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
            parameters, options,
            {.type = "sgd",
             .fused = options.fused,
             .keys = options.momentum == 0 ? std::vector<std::string>{}
                                           : std::vector<std::string>{"momentum_buffer"},
             .no_sparse = options.weight_decay == 0 ? "" : "set weight_decay to 0"}),
        options_(options) {}

 protected:
  void update_fused(ParameterBatch& batch, const std::optional<at::Tensor>& found_inf) override {
    // Never the first step: velocities start at 0, with the same result.
    at::_fused_sgd_(batch.parameters, batch.gradients, velocities(batch), batch.weight_decay,
                    options_.momentum, batch.lr, /*dampening=*/0, options_.nesterov,
                    /*maximize=*/false, /*is_first_step=*/false, /*grad_scale=*/{}, found_inf);
  }

  void update_foreach(ParameterBatch& batch) override {
    ParameterBatch::Tensors updates = batch.gradients;
    if (batch.weight_decay != 0) {
      updates = at::_foreach_add(updates, batch.parameters, batch.weight_decay);
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

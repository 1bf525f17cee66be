#include "optimizers/sgd.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>

#include "optimizers/optimizer_options.h"
#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

class Sgd : public StatefulOptimizer {
 public:
  Sgd(const SgdOptions& options, const NamedTensors& parameters)
      : StatefulOptimizer(
            parameters, {.type = "sgd",
                         .fused = options.fused,
                         .keys = has_momentum(options) ? std::vector<std::string>{"momentum_buffer"}
                                                       : std::vector<std::string>{},
                         .no_sparse = options.weight_decay == 0 ? "" : "set weight_decay to 0"}),
        options_(options) {}

  double base_lr() const override { return options_.lr; }

 protected:
  void update_fused(ParameterBatch& batch, double lr) override {
    // The first update is as all others: what is remembered begins at 0.
    at::_fused_sgd_(batch.parameters, batch.gradients, velocities(batch), options_.weight_decay,
                    options_.momentum, lr, /*dampening=*/0, options_.nesterov, /*maximize=*/false,
                    /*is_first_step=*/false);
  }

  void update_foreach(ParameterBatch& batch, double lr) override {
    ParameterBatch::Tensors updates = batch.gradients;
    if (options_.weight_decay != 0) {
      updates = at::_foreach_add(updates, batch.parameters, options_.weight_decay);
    }
    if (has_momentum(options_)) {
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
  static bool has_momentum(const SgdOptions& options) { return options.momentum != 0; }
  static at::TensorList velocities(const ParameterBatch& batch) {
    return batch.memory.empty() ? at::TensorList() : at::TensorList(batch.memory[0]);
  }

  SgdOptions options_;
};

}  // namespace

void SgdOptions::describe(config::Schema<SgdOptions>& schema) {
  describe_common(schema);
  schema.field("momentum", &SgdOptions::momentum, "how much of the former update stays")
      .at_least(0)
      .below(1);
  schema.field("weight_decay", &SgdOptions::weight_decay, "L2 penalty")
      .at_least(0)
      .at_most(kMaxRate);
  schema.field("nesterov", &SgdOptions::nesterov, "use Nesterov's momentum");
  schema.check([](const SgdOptions& options) -> std::optional<std::string> {
    if (options.nesterov && options.momentum == 0) return "nesterov needs a momentum above 0";
    return std::nullopt;
  });
}

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options, const NamedTensors& parameters) {
  return std::make_unique<Sgd>(options, parameters);
}

}  // namespace syncbn::train

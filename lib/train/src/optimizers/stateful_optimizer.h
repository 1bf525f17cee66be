#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

#include "optimizers/parameter_groups.h"

namespace syncbn::train {

/// Parameters that one operator updates together: of one device, type, and options. For
/// update_foreach() the number of updates is the same as well.
struct ParameterBatch {
  using Tensors = std::vector<at::Tensor>;

  Tensors parameters;
  Tensors gradients;
  std::vector<Tensors> state;  ///< by key, then by parameter
  Tensors counts;              ///< updates of each parameter, this one included: float32 scalars
  double steps = 0;            ///< the same as a number, for update_foreach()
  ParameterOptions options;
  double lr = 0;
  double weight_decay = 0;
  bool fused = false;
};

/// The part of an optimizer that does not depend on its formula: the state of each parameter, and
/// which parameters are updated together.
class StatefulOptimizer : public Optimizer {
 public:
  struct Traits {
    std::string type;               ///< for messages
    bool fused = false;             ///< use torch's fused operators where possible
    std::vector<std::string> keys;  ///< of the state: tensors of the parameter's shape
    bool counts_steps = false;      ///< the state also has the number of updates
    /// What to do about sparse gradients, for a message. Empty if they can be used.
    std::string no_sparse = {};
  };

  StatefulOptimizer(const NamedTensors& parameters, const CommonOptions& options, Traits traits);

  double base_lr() const final { return base_lr_; }
  std::optional<int64_t> lr_batch() const final { return lr_batch_; }
  void step(double lr, const at::Tensor& found_inf = {}) final;
  OptimizerState state() const final;
  void load(const OptimizerState& state) final;

 protected:
  /// Updates in one pass, unless `found_inf` is defined and not 0. Parameters, gradients and state
  /// are dense and have the same strides.
  virtual void update_fused(ParameterBatch& batch, const std::optional<at::Tensor>& found_inf);
  /// Updates operation by operation, with the same bits as torch.optim's default on CPUs.
  virtual void update_foreach(ParameterBatch& batch) = 0;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    ParameterOptions options;
    std::vector<at::Tensor> state = {};  ///< by key; undefined before the first update
    at::Tensor count = {};               ///< the same
  };

  std::vector<ParameterBatch> batches(double lr);
  bool can_fuse(const Slot& slot, const at::Tensor& gradient) const;

  Traits traits_;
  double base_lr_;
  std::optional<int64_t> lr_batch_;
  std::vector<Slot> slots_;
};

// Add the optimizers of a file to the registry.
void add_sgd(OptimizerKind::Registry& registry);
void add_adam(OptimizerKind::Registry& registry);
void add_rmsprop(OptimizerKind::Registry& registry);
void add_lamb(OptimizerKind::Registry& registry);

template <class Options>
void describe_fused(config::Schema<Options>& schema) {
  schema.field("fused", &Options::fused,
               "update in one pass over memory; false: operation by operation, which rounds as "
               "Python's default does");
}

/// The function that makes a `Kind` from its options.
template <class Kind, class Options>
std::unique_ptr<Optimizer> make_optimizer(const Options& options, const NamedTensors& parameters) {
  return std::make_unique<Kind>(options, parameters);
}

}  // namespace syncbn::train

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Scalar.h>

#include <syncbn/train/optimizer.h>

#include "optimizers/parameter_groups.h"

namespace syncbn::train {

/// Parameters that one operator updates together: they share device, type, learning rate and weight
/// decay.
struct ParameterBatch {
  using Tensors = std::vector<at::Tensor>;

  Tensors parameters;
  Tensors gradients;
  std::vector<Tensors> state;  ///< by key, then by parameter
  Tensors counts;              ///< updates of each parameter, including this one: float scalars
  double lr = 0;
  double weight_decay = 0;
  bool fused = false;
  bool is_first_step = false;  ///< only if Traits::first_step_differs
  /// If 1, the fused operator changes nothing. On the device; empty: 0.
  std::optional<at::Tensor> found_inf = {};

  /// Gradients plus that of the L2 penalty.
  Tensors decayed_gradients() const;
};

/// The part of an optimizer that does not depend on its formula: the state of each parameter, and
/// which parameters are updated together.
class StatefulOptimizer : public Optimizer {
 public:
  enum class Sparse { kNever, kWithoutWeightDecay };

  struct Traits {
    std::string type;               ///< for messages
    bool fused = true;              ///< use torch's fused operators where possible
    std::vector<std::string> keys;  ///< of the state: tensors of the parameter's shape
    bool counts_steps = false;      ///< the state also counts the updates
    /// Whether the first update differs from one with a state of zeros.
    bool first_step_differs = false;
    Sparse sparse = Sparse::kNever;  ///< which sparse gradients can be used
  };

  StatefulOptimizer(const CommonOptions& options, const NamedTensors& parameters, Traits traits);

  double base_lr() const final { return base_lr_; }
  std::optional<int64_t> lr_batch() const final { return lr_batch_; }
  std::vector<Group> groups() const final;
  void step(double lr, const at::Tensor& found_inf = {}) final;
  OptimizerState state() const final;
  void load(const OptimizerState& state) final;

 protected:
  /// Looks at all gradients before the updates, and may replace them.
  virtual void prepare(std::vector<ParameterBatch>& /*batches*/) {}
  /// Updates in one pass. Parameters, gradients and state are dense and have the same strides.
  virtual void update_fused(ParameterBatch& /*batch*/) {}
  /// Updates operation by operation, with the same bits as torch.optim's default on CPUs.
  virtual void update_foreach(ParameterBatch& batch) = 0;

  /// A number for each parameter that depends on its number of updates.
  template <class Function>
  static std::vector<at::Scalar> by_count(const ParameterBatch& batch, const Function& function) {
    std::vector<at::Scalar> values;
    for (const at::Tensor& count : batch.counts) {
      values.emplace_back(function(static_cast<double>(count.item<float>())));
    }
    return values;
  }

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    ParameterRates rates;
    std::vector<at::Tensor> state = {};  ///< by key; undefined before the first update
    at::Tensor count = {};               ///< updates; undefined before the first
  };
  /// Slots that are updated as one batch.
  struct SlotGroup {
    std::vector<Slot*> slots;
    bool fused = false;
    bool is_first_step = false;
  };

  std::vector<SlotGroup> slots_to_update();
  /// @throws base::UserError for a sparse gradient that the formula cannot use
  void check_layout(const Slot& slot) const;
  bool can_fuse(const Slot& slot) const;
  /// A slot's count, on the parameter's device if the fused operators read it.
  at::Tensor make_count(float updates, const Slot& slot) const;
  /// @param lr the optimizer's learning rate, to which the group's is in proportion
  ParameterBatch make_batch(const SlotGroup& group, double lr) const;

  double base_lr_;
  std::optional<int64_t> lr_batch_;
  Traits traits_;
  std::vector<Slot> slots_;
};

template <class Kind, class Options>
std::unique_ptr<Optimizer> make_optimizer(const Options& options, const NamedTensors& parameters) {
  return std::make_unique<Kind>(options, parameters);
}

}  // namespace syncbn::train

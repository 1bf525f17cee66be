#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

namespace syncbn::train {

constexpr double kMaxRate = 1e6;  ///< upper bound on options; more is a typing error

/// Parameters that one operator updates together: of one device, type and number of updates.
struct ParameterBatch {
  using Tensors = std::vector<at::Tensor>;

  Tensors parameters;
  Tensors gradients;
  std::vector<Tensors> state;  ///< by key, then by parameter
  int64_t steps = 0;           ///< updates so far, this one included
  bool fused = false;
};

/// The part of an optimizer that does not depend on its formula: the state of each parameter, and
/// which parameters are updated together.
class StatefulOptimizer : public Optimizer {
 public:
  struct Traits {
    std::string type;               ///< for messages
    bool fused = true;              ///< use torch's fused operators where possible
    std::vector<std::string> keys;  ///< of the state: tensors of the parameter's shape
    bool counts_steps = false;      ///< the state also has the number of updates
    /// What to do about sparse gradients, for a message. Empty if they can be used.
    std::string no_sparse = {};
  };

  StatefulOptimizer(const NamedTensors& parameters, Traits traits);

  void step(double lr, const at::Tensor& found_inf = {}) final;
  OptimizerState state() const final;
  void load(const OptimizerState& state) final;

 protected:
  /// Updates in one pass. Parameters, gradients and state are dense and have the same strides.
  virtual void update_fused(ParameterBatch& batch, double lr) = 0;
  /// Updates operation by operation, with the same bits as torch.optim's default on CPUs.
  virtual void update_foreach(ParameterBatch& batch, double lr) = 0;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    std::vector<at::Tensor> state = {};  ///< by key; undefined before the first update
    int64_t steps = 0;
  };

  std::vector<ParameterBatch> batches();
  bool can_fuse(const Slot& slot, const at::Tensor& gradient) const;

  Traits traits_;
  std::vector<Slot> slots_;
};

}  // namespace syncbn::train

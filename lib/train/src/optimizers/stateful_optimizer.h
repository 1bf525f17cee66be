#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// Parameters that one call of an operator updates: of one device and type, equally often updated
/// before.
struct ParameterBatch {
  using Tensors = std::vector<at::Tensor>;

  Tensors parameters;
  Tensors gradients;
  std::vector<Tensors> memory;  ///< by what is remembered, then by parameter
  int64_t steps = 0;            ///< done so far, this one included
};

/// The part of an optimizer that does not depend on its formula: which parameters are updated
/// together, and what is remembered of each.
class StatefulOptimizer : public Optimizer {
 public:
  struct Traits {
    std::string type;               ///< for messages
    bool fused = true;              ///< use torch's fused operators where they can be
    std::vector<std::string> keys;  ///< what is remembered: tensors of the parameter's shape
    bool counts_steps = false;      ///< also remembered: the number of updates
    /// Why sparse gradients cannot be used; empty: they can be.
    std::string no_sparse = {};
  };

  StatefulOptimizer(const NamedTensors& parameters, Traits traits);

  void step(double lr) final;
  OptimizerState state() const final;
  void load(const OptimizerState& state) final;

 protected:
  /// With an operator that does it all in one pass. Parameters, gradients and memory are dense and
  /// laid out alike.
  virtual void update_fused(ParameterBatch& batch, double lr) = 0;
  /// Operation by operation, which gives the values of torch.optim's default on CPUs, bit for bit.
  virtual void update_foreach(ParameterBatch& batch, double lr) = 0;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    std::vector<at::Tensor> memory;  ///< in the order of keys; undefined before the first update
    int64_t steps = 0;
  };
  struct Batch : ParameterBatch {
    bool fused = false;
  };

  std::vector<Batch> batches();
  bool can_fuse(const Slot& slot, const at::Tensor& gradient) const;
  void check_sparse(const Slot& slot) const;
  Slot& find(std::vector<Slot>& slots, const std::string& name) const;
  void load_slot(Slot& slot, const std::map<std::string, at::Tensor>& tensors) const;

  Traits traits_;
  std::vector<Slot> slots_;
};

}  // namespace syncbn::train

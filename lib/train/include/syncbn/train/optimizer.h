#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// at::Tensor: what is optimised.
#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>

namespace syncbn::train {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// What an optimizer remembers between steps: by parameter, by the name that torch.optim gives it.
using OptimizerState = std::map<std::string, std::map<std::string, at::Tensor>>;

/// Updates parameters from their gradients, with torch.optim's formulas, names and defaults.
/// Parameters without a gradient are left alone. Parameters may be of different devices and types.
/// Not thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// The learning rate of the configuration, from which a schedule starts.
  virtual double base_lr() const = 0;

  /// @throws base::UserError for a sparse gradient, where torch.optim refuses it, too.
  virtual void step(double lr) = 0;

  /// Tensors of a parameter's shape are the optimizer's own, not copies.
  virtual OptimizerState state() const = 0;

  /// Tensors may lie in memory in another way than the parameters, or on another device.
  /// @throws base::UserError for a parameter that is unknown or of another shape.
  virtual void load(const OptimizerState& state) = 0;
};

/// The registry behind `optimizer: {type: sgd}`. Knows sgd and adamw.
struct OptimizerKind {
  using Registry = config::Registry<std::unique_ptr<Optimizer>, const NamedTensors&>;
  static Registry& registry();
};

}  // namespace syncbn::train

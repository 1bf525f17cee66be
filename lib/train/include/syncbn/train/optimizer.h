#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>

namespace syncbn::train {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// State of an optimizer, by parameter and by torch.optim's key ("momentum_buffer").
using OptimizerState = std::map<std::string, std::map<std::string, at::Tensor>>;

/// Updates parameters from their gradients, with torch.optim's formulas, names and defaults. Skips
/// parameters without a gradient. Parameters may be on several devices and of several types. Not
/// thread-safe.
class Optimizer {
 public:
  /// Parameters with the same learning rate and weight decay.
  struct Group {
    NamedTensors parameters;
    double lr = 0;  ///< when the optimizer's rate is base_lr()
    double weight_decay = 0;
  };

  virtual ~Optimizer() = default;

  virtual double base_lr() const = 0;

  /// The global batch size for which base_lr() is meant, if a configuration names one.
  virtual std::optional<int64_t> lr_batch() const { return std::nullopt; }

  /// All parameters. Groups are in the order of their first parameters.
  virtual std::vector<Group> groups() const = 0;

  /// @param found_inf a float32 scalar on the device; if it is not 0, the step changes nothing.
  ///   Undefined: 0.
  /// @throws base::UserError for a sparse gradient where torch.optim refuses it as well
  virtual void step(double lr, const at::Tensor& found_inf = {}) = 0;

  /// The optimizer's own tensors, not copies.
  virtual OptimizerState state() const = 0;

  /// Copies `state`, whose tensors may have other strides and devices than the parameters.
  /// @throws base::UserError for an unknown parameter or another shape.
  virtual void load(const OptimizerState& state) = 0;
};

/// base_lr() for steps of `global_batch` samples: multiplied by global_batch / lr_batch().
inline double scaled_lr(const Optimizer& optimizer, int64_t global_batch) {
  const std::optional<int64_t> batch = optimizer.lr_batch();
  if (!batch) return optimizer.base_lr();
  return optimizer.base_lr() * (static_cast<double>(global_batch) / static_cast<double>(*batch));
}

/// The registry behind `optimizer: {type: sgd}`. Contains sgd, adam, adamw, rmsprop and lamb.
struct OptimizerKind {
  using Registry = config::Registry<std::unique_ptr<Optimizer>, const NamedTensors&>;
  static Registry& registry();
};

}  // namespace syncbn::train

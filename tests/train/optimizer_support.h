#pragma once

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/train/optimizer.h>

#include <string>

#include "support/from_yaml.h"

namespace syncbn::train {

inline std::unique_ptr<Optimizer> optimizer(const std::string& yaml,
                                            const NamedTensors& parameters) {
  return test::from_yaml<OptimizerKind>(yaml, "optimizer").make(parameters);
}

inline NamedTensors make_parameters(at::ScalarType type = at::kFloat) {
  at::manual_seed(1);
  NamedTensors parameters;
  parameters.emplace_back("weight", at::randn({3, 4}).to(type).set_requires_grad(true));
  parameters.emplace_back("bias", at::randn({4}).to(type).set_requires_grad(true));
  return parameters;
}

inline void set_gradients(const NamedTensors& parameters, int64_t step) {
  at::manual_seed(static_cast<uint64_t>(100 + step));
  for (const auto& [name, parameter] : parameters) {
    parameter.mutable_grad() = at::randn(parameter.sizes()).to(parameter.scalar_type());
  }
}

/// One configuration for each kind of update.
inline constexpr const char* kKinds[] = {
    "{type: sgd, momentum: 0.9, weight_decay: 0.01}",
    "{type: sgd, momentum: 0.9, weight_decay: 0.01, fused: false}",
    "{type: sgd, momentum: 0.9, dampening: 0.5}",
    "{type: sgd, momentum: 0.9, dampening: 0.5, fused: false}",
    "{type: adam, weight_decay: 0.01, amsgrad: true}",
    "{type: adam, fused: false}",
    "{type: adamw}",
    "{type: adamw, fused: false}",
    "{type: rmsprop, momentum: 0.9, centered: true}",
    "{type: lamb}"};

}  // namespace syncbn::train

#pragma once

#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

#include "optimizers/common_options.h"

namespace syncbn::train {

/// The rates of a parameter according to `groups`, `no_decay` and `layer_decay`.
struct ParameterRates {
  double lr = 0;  ///< when the optimizer's rate is CommonOptions::lr
  double weight_decay = 0;

  bool operator==(const ParameterRates&) const = default;
};

/// The rates of each parameter.
/// @throws base::UserError for a pattern that matches no parameter
std::vector<ParameterRates> parameter_rates(const CommonOptions& options,
                                            const NamedTensors& parameters);

/// The layer of each parameter, from 0. Successive parameters share a layer if their names agree up
/// to the first component that ends in a digit (`layer1`, `encoder.blocks.3`) or, without such a
/// component, in the first one. The last component, the parameter's own name, does not count if the
/// parameter is part of a module.
std::vector<size_t> layers_of(const std::vector<std::string>& names);

}  // namespace syncbn::train

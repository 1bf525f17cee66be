#pragma once

#include <string>
#include <vector>

#include <syncbn/train/optimizer.h>

#include "optimizers/common_options.h"

namespace syncbn::train {

/// What `groups`, `no_decay` and `layer_decay` make of a parameter.
struct ParameterRates {
  double lr = 0;  ///< where the optimizer's is CommonOptions::lr
  double weight_decay = 0;

  bool operator==(const ParameterRates&) const = default;
};

/// The rates of each parameter.
/// @throws base::UserError for a pattern that matches no parameter.
std::vector<ParameterRates> parameter_rates(const CommonOptions& options,
                                            const NamedTensors& parameters);

/// The layer of each parameter, from 0. Parameters follow each other in a layer as long as their
/// names agree up to the first component that ends in a digit (`layer1`, `encoder.blocks.3`), or in
/// the first component where there is none. The last component, the parameter's own name, is left
/// out where the parameter is part of a module.
std::vector<size_t> layers_of(const std::vector<std::string>& names);

}  // namespace syncbn::train

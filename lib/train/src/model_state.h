#pragma once

#include <map>
#include <string>

// at::Tensor: what a model consists of.
#include <ATen/core/Tensor.h>

#include <syncbn/models/model.h>
#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// What an optimizer updates: the parameters that take gradients.
NamedTensors trainable_parameters(const models::Model& model);

/// Parameters and buffers: the model's own tensors, not copies.
std::map<std::string, at::Tensor> state_of(const models::Model& model);

/// Copies what state_of() gave into a model.
/// @throws base::UserError for other names or shapes; in its message `saved` is "it".
void load_model(const std::map<std::string, at::Tensor>& saved, const models::Model& model);

}  // namespace syncbn::train

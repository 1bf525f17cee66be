#pragma once

#include <memory>

#include <syncbn/config/component.h>

namespace syncbn::models {

class Model;
struct ModelArgs;

/// The registry behind `model: {type: resnet50}`. It has torchvision's networks under torchvision's
/// names, with the same parameters, buffers and, for the same seed, initial values; and digits,
/// unet, deeplabv3plus_*, dcgan and networks of TorchScript files.
/// make() draws the initial parameters from torch's default generator (torch::manual_seed). It
/// throws base::UserError if the model does not take samples of the given shape. Both kinds of
/// normalisation give the same parameter and buffer names, and the same initial values. A custom
/// model is a class and a line of registration, as for data::DatasetKind.
///
/// This header is separate from model.h because configurations need only this, and libtorch's
/// modules take 13 s to compile.
struct ModelKind {
  using Registry = config::Registry<std::shared_ptr<Model>, const ModelArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::models

#pragma once

#include <syncbn/models/model.h>

namespace syncbn::models {

/// He et al.'s initialisation (arXiv:1502.01852) of every convolution below `model`: normal, by
/// fan-out, for ReLU.
void init_convolutions(torch::nn::Module& model);

/// Of the samples that a model is made for.
struct ImageShape {
  int64_t channels;
  int64_t height;
  int64_t width;
};

/// @throws base::UserError naming the model when the samples are not images of at least `min_side`
///   pixels a side, or when there is no class.
ImageShape image_shape(const char* model, const ModelArgs& args, int64_t min_side);

}  // namespace syncbn::models

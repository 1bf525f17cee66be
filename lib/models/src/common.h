#pragma once

#include <torch/nn/modules/conv.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A square convolution without bias that keeps the size at stride 1.
torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1);

/// He et al.'s initialisation (arXiv:1502.01852) of all convolutions: normal, by fan-out, for ReLU.
void init_convolutions(torch::nn::Module& model);

/// The number of channels of the samples that a model is made for.
/// @throws base::UserError naming the model when the samples are not images of at least `min_side`
///   x `min_side` pixels, or when there is no class.
int64_t image_channels(const char* model, const ModelArgs& args, int64_t min_side);

}  // namespace syncbn::models

#include "common.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include <syncbn/base/error.h>

namespace syncbn::models {

torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                               .stride(stride)
                               .padding((kernel - 1) / 2)
                               .bias(false));
}

void init_convolutions(torch::nn::Module& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* conv = module->as<torch::nn::Conv2dImpl>()) {
      torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }
}

int64_t image_channels(const char* model, const ModelArgs& args, int64_t min_side) {
  const auto& shape = args.sample_shape;
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < min_side || shape[2] < min_side) {
    throw base::UserError(fmt::format(
        "model {}: takes images [channels, height, width] of at least {} x {} pixels, the data "
        "set's samples have the shape [{}]",
        model, min_side, min_side, fmt::join(shape, ", ")));
  }
  if (args.num_classes < 1) {
    throw base::UserError(
        fmt::format("model {}: needs at least one class, got {}", model, args.num_classes));
  }
  return shape[0];
}

}  // namespace syncbn::models

#include "init.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/conv.h>

#include <syncbn/base/error.h>

namespace syncbn::models {

void init_convolutions(torch::nn::Module& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* conv = module->as<torch::nn::Conv2dImpl>()) {
      torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }
}

ImageShape image_shape(const char* model, const ModelArgs& args, int64_t min_side) {
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
  return {shape[0], shape[1], shape[2]};
}

}  // namespace syncbn::models

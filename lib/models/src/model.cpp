#include <syncbn/models/model.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/models/digits_net.h>
#include <syncbn/models/resnet.h>
#include <torch/nn/init.h>

#include "common.h"

namespace syncbn::models {

ModelKind::Registry& ModelKind::registry() {
  static Registry registry = [] {
    Registry made;
    made.add<DigitsNetOptions>("digits", "three convolutions and a linear layer, for tiny images",
                               [](const DigitsNetOptions& options, const ModelArgs& args) {
                                 return digits_net(args, options);
                               });
    made.add<ResNetOptions>("resnet18", "ResNet-18, with torchvision's parameter names",
                            [](const ResNetOptions& options, const ModelArgs& args) {
                              return resnet18(args, options);
                            });
    made.add<ResNetOptions>("resnet50", "ResNet-50, with torchvision's parameter names",
                            [](const ResNetOptions& options, const ModelArgs& args) {
                              return resnet50(args, options);
                            });
    return made;
  }();
  return registry;
}

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

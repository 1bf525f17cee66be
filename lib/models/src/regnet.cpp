#include <ATen/ops/adaptive_avg_pool2d.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

struct RegNetShape {
  int depth = 0;      ///< blocks
  int64_t width = 0;  ///< channels of the first block
  double slope = 0;   ///< channels that each block adds, before they are rounded
  double factor = 0;  ///< between the channels of successive stages
  int64_t group_width = 0;
  bool squeezes = false;
};

struct RegNetStage {
  int64_t width = 0;
  int depth = 0;
  int64_t groups = 0;
};

/// Block widths grow linearly and are rounded to `width` times powers of `factor`, then to
/// multiples of 8. Blocks of equal width form a stage (section 3.3 of the paper).
std::vector<RegNetStage> stages_of(const RegNetShape& shape) {
  std::vector<RegNetStage> stages;
  const auto first = static_cast<double>(shape.width);
  for (int block = 0; block < shape.depth; ++block) {
    const double linear = first + shape.slope * block;
    const double power = std::nearbyint(std::log(linear / first) / std::log(shape.factor));
    const auto width =
        8 * static_cast<int64_t>(std::nearbyint(first * std::pow(shape.factor, power) / 8));
    if (stages.empty() || stages.back().width != width) stages.push_back({.width = width});
    ++stages.back().depth;
  }
  for (RegNetStage& stage : stages) {
    const int64_t group_width = std::min(shape.group_width, stage.width);
    stage.width = make_divisible(static_cast<double>(stage.width), group_width);
    stage.groups = stage.width / group_width;
  }
  return stages;
}

/// Three convolutions, the second with groups, and a shortcut.
class RegNetBlock : public torch::nn::Module {
 public:
  RegNetBlock(int64_t in, const RegNetStage& stage, int64_t stride, bool squeezes,
              const NormFactory& norm)
      : layers_(std::make_shared<Chain>()) {
    const int64_t out = stage.width;
    if (in != out || stride != 1) {
      projection_ = register_module(
          "proj", conv_norm(in, out, norm,
                            {.kernel = 1, .stride = stride, .activation = Activation::kNone}));
    }
    layers_->add(conv_norm(in, out, norm, {.kernel = 1}), "a");
    layers_->add(conv_norm(out, out, norm, {.stride = stride, .groups = stage.groups}), "b");
    if (squeezes) {
      const auto squeezed = static_cast<int64_t>(std::nearbyint(0.25 * static_cast<double>(in)));
      layers_->add(std::make_shared<SqueezeExcitation>(out, squeezed), "se");
    }
    auto last = std::make_shared<Chain>();
    last->add(conv(out, out, 1));
    norm_ = norm.with_relu(out);  // forward() runs it with the shortcut
    last->add_name(norm_.ptr());
    layers_->add(last, "c");
    register_module("f", layers_);
  }

  at::Tensor forward(const at::Tensor& x) {
    return norm_.forward(layers_->forward(x), projection_ ? projection_->forward(x) : x);
  }

 private:
  std::shared_ptr<Chain> projection_;
  std::shared_ptr<Chain> layers_;
  NormRelu norm_;
};

class RegNet : public Model {
 public:
  RegNet(const std::string& name, const ModelArgs& args, const DropoutOptions& options,
         const RegNetShape& shape)
      : trunk_(std::make_shared<Chain>()), classifier_(nullptr) {
    const NormFactory norm(args);
    int64_t in = 32;
    stem_ =
        register_module("stem", conv_norm(image_channels(name, args, 1), in, norm, {.stride = 2}));
    register_module("trunk_output", trunk_);
    int number = 0;
    for (const RegNetStage& stage : stages_of(shape)) {
      const std::string stage_name = "block" + std::to_string(++number);
      auto blocks = std::make_shared<Chain>(args.activation_checkpointing);
      for (int i = 0; i < stage.depth; ++i) {
        blocks->add(std::make_shared<RegNetBlock>(in, stage, i == 0 ? 2 : 1, shape.squeezes, norm),
                    stage_name + "-" + std::to_string(i));
        in = stage.width;
      }
      trunk_->add(blocks, stage_name);
    }
    classifier_ = register_module("fc", torch::nn::Linear(in, args.num_classes));
    dropout_ = options.dropout.value_or(0);
    init();
  }

  at::Tensor forward(at::Tensor x) override {
    x = at::adaptive_avg_pool2d(trunk_->forward(stem_->forward(x)), {1, 1}).flatten(1);
    return classifier_->forward(at::dropout(x, dropout_, is_training()));
  }

 private:
  /// Like torchvision: ignores groups, and keeps the biases of squeeze and excitation.
  void init() {
    for (const auto& module : modules(/*include_self=*/false)) {
      const auto* conv = module->as<torch::nn::Conv2dImpl>();
      if (conv == nullptr) continue;
      const int64_t fan_out = conv->weight.size(0) * conv->weight.size(2) * conv->weight.size(3);
      torch::nn::init::normal_(conv->weight, 0, std::sqrt(2.0 / static_cast<double>(fan_out)));
    }
    init_layers(*this, {}, normal_init(0.01));
  }

  double dropout_ = 0;
  std::shared_ptr<Chain> stem_;
  std::shared_ptr<Chain> trunk_;
  torch::nn::Linear classifier_;
};

}  // namespace

void add_regnets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const RegNetShape& shape) {
    add_network<DropoutOptions, RegNet>(
        registry, name,
        "RegNet (Radosavovic et al., arXiv:2003.13678), y with squeeze and excitation", shape);
  };
  add("regnet_x_400mf", {22, 24, 24.48, 2.54, 16, false});
  add("regnet_x_800mf", {16, 56, 35.73, 2.28, 16, false});
  add("regnet_x_1_6gf", {18, 80, 34.01, 2.25, 24, false});
  add("regnet_x_3_2gf", {25, 88, 26.31, 2.25, 48, false});
  add("regnet_x_8gf", {23, 80, 49.56, 2.88, 120, false});
  add("regnet_x_16gf", {22, 216, 55.59, 2.1, 128, false});
  add("regnet_x_32gf", {23, 320, 69.86, 2.0, 168, false});
  add("regnet_y_400mf", {16, 48, 27.89, 2.09, 8, true});
  add("regnet_y_800mf", {14, 56, 38.84, 2.4, 16, true});
  add("regnet_y_1_6gf", {27, 48, 20.71, 2.65, 24, true});
  add("regnet_y_3_2gf", {21, 80, 42.63, 2.66, 24, true});
  add("regnet_y_8gf", {17, 192, 76.82, 2.19, 56, true});
  add("regnet_y_16gf", {18, 200, 106.23, 2.48, 112, true});
  add("regnet_y_32gf", {20, 232, 115.89, 2.53, 232, true});
  add("regnet_y_128gf", {27, 456, 160.83, 2.52, 264, true});
}

}  // namespace syncbn::models

#include <syncbn/models/resnet.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/dist/checkpoint.h>
#include <syncbn/models/norm.h>

#include "backbones.h"
#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

// Modules are constructed and registered in torchvision's order: registration determines the order
// of parameters, construction that of random draws, so that a seed gives torchvision's weights.

/// A residual block of two 3x3 convolutions or, as a bottleneck, of 1x1, 3x3 and 1x1 convolutions.
class Block : public torch::nn::Module {
 public:
  struct Shape {
    int64_t in = 0;
    int64_t width = 0;  ///< channels inside
    int64_t out = 0;
    int64_t stride = 1;
    int64_t groups = 1;  ///< of the 3x3 convolution of a bottleneck
    bool bottleneck = false;
    bool projects = true;  ///< the shortcut between different shapes is a 1x1 convolution
    int64_t dilation = 1;  ///< of the 3x3 convolution of a bottleneck
  };

  Block(const Shape& shape, const NormFactory& norm, double drop_path)
      : stride_(shape.stride), added_channels_(shape.out - shape.in) {
    if (shape.projects && (stride_ != 1 || added_channels_ != 0)) {
      downsample_ = torch::nn::Sequential(conv(shape.in, shape.out, 1, stride_), norm(shape.out));
    }
    if (shape.bottleneck) {
      add(conv(shape.in, shape.width, 1), norm);
      add(conv(shape.width, shape.width, 3, stride_, shape.groups, shape.dilation), norm);
      add(conv(shape.width, shape.out, 1), norm, drop_path);
    } else {
      add(conv(shape.in, shape.out, 3, stride_), norm);
      add(conv(shape.out, shape.out, 3), norm, drop_path);
    }
    if (downsample_) register_module("downsample", downsample_);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (size_t i = 0; i + 1 < convs_.size(); ++i) y = norms_[i].forward(convs_[i]->forward(y));
    y = convs_.back()->forward(y);
    return norms_.back().forward(y, shortcut(x), /*drops=*/is_training());
  }

  void zero_last_norm() {
    torch::nn::init::zeros_(norms_.back().ptr()->named_parameters(/*recurse=*/false)["weight"]);
  }

 private:
  void add(torch::nn::Conv2d conv, const NormFactory& norm, double drop_path = 0) {
    norms_.push_back(norm.with_relu(conv->options.out_channels(), drop_path));
    convs_.push_back(std::move(conv));
    const std::string number = std::to_string(convs_.size());
    register_module("conv" + number, convs_.back());
    register_module("bn" + number, norms_.back().ptr());
  }

  at::Tensor shortcut(const at::Tensor& x) {
    if (downsample_) return downsample_->forward(x);
    if (stride_ == 1 && added_channels_ == 0) return x;
    const at::Tensor taken =
        x.slice(2, 0, std::nullopt, stride_).slice(3, 0, std::nullopt, stride_);
    const int64_t before = added_channels_ / 2;
    return at::constant_pad_nd(taken, {0, 0, 0, 0, before, added_channels_ - before});
  }

  int64_t stride_;
  int64_t added_channels_;
  std::vector<torch::nn::Conv2d> convs_;
  std::vector<NormRelu> norms_;
  torch::nn::Sequential downsample_{nullptr};
};

struct ResNetShape {
  std::vector<int> depths;  ///< blocks of each stage
  bool bottleneck = false;
  int64_t groups = 1;
  int64_t group_width = 64;  ///< channels of a group in the first stage
  int64_t channels = 64;     ///< of the first convolution; each stage after the first doubles them
  bool small_input = false;  ///< regardless of the options
  bool projects = true;      ///< see Block::Shape
  size_t dilated_from = SIZE_MAX;  ///< the first stage with dilation instead of a stride
};

class ResNet : public Model {
 public:
  ResNet(const std::string& name, const ModelArgs& args, const ResNetOptions& options,
         const ResNetShape& shape)
      : small_input_(options.small_input || shape.small_input),
        recomputes_(args.activation_checkpointing),
        dropout_(options.dropout) {
    const int64_t channels = image_channels(name, args, 1);
    const NormFactory norm(args);
    conv1_ = register_module("conv1", small_input_ ? conv(channels, shape.channels, 3)
                                                   : conv(channels, shape.channels, 7, 2));
    bn1_ = norm.with_relu(shape.channels);
    register_module("bn1", bn1_.ptr());
    const int last_block = std::reduce(shape.depths.begin(), shape.depths.end()) - 1;
    int64_t in = shape.channels;
    int64_t dilation = 1;
    for (size_t i = 0; i < shape.depths.size(); ++i) {
      const int64_t channels_of_stage = shape.channels << i;
      torch::nn::Sequential stage;
      for (int k = 0; k < shape.depths[i]; ++k) {
        const Block::Shape block = {
            .in = in,
            .width = channels_of_stage * shape.group_width / 64 * shape.groups,
            .out = shape.bottleneck ? 4 * channels_of_stage : channels_of_stage,
            .stride = i > 0 && k == 0 && i < shape.dilated_from ? 2 : 1,
            .groups = shape.groups,
            .bottleneck = shape.bottleneck,
            .projects = shape.projects,
            .dilation = dilation};
        const double drop_path =
            options.stochastic_depth * static_cast<double>(blocks_.size()) / last_block;
        blocks_.push_back(std::make_shared<Block>(block, norm, drop_path));
        stage->push_back(blocks_.back());
        in = block.out;
        // The first block has the dilation of the previous stage.
        if (k == 0 && i >= shape.dilated_from) dilation *= 2;
      }
      stage_ends_.push_back(blocks_.size());
      register_module("layer" + std::to_string(i + 1), stage);
    }
    fc_ = register_module("fc", torch::nn::Linear(in, args.num_classes));
    init_layers(*this, kaiming_init(), {});
    if (options.zero_init_residual) {
      for (const auto& block : blocks_) block->zero_last_norm();
    }
  }

  /// The outputs of the stages.
  std::vector<at::Tensor> features(at::Tensor x) {
    x = bn1_.forward(conv1_->forward(x));
    if (!small_input_) x = at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      x = run(blocks_[i], x);
      if (i + 1 == stage_ends_[outputs.size()]) outputs.push_back(x);
    }
    return outputs;
  }

  at::Tensor forward(at::Tensor x) override {
    x = at::adaptive_avg_pool2d(features(x).back(), {1, 1}).flatten(1);
    return fc_->forward(at::dropout(x, dropout_, is_training()));
  }

 private:
  at::Tensor run(const std::shared_ptr<Block>& block, const at::Tensor& x) const {
    if (!recomputes_) return block->forward(x);
    return dist::checkpoint([block](const at::Tensor& input) { return block->forward(input); }, x);
  }

  bool small_input_;
  bool recomputes_;
  double dropout_;
  torch::nn::Conv2d conv1_{nullptr};
  NormRelu bn1_;
  std::vector<std::shared_ptr<Block>> blocks_;  ///< of all stages
  std::vector<size_t> stage_ends_;
  torch::nn::Linear fc_{nullptr};
};

template <class Options>
void describe_all_but_stem(config::Schema<Options>& schema) {
  schema.field("zero_init_residual", &ResNetOptions::zero_init_residual,
               "start each residual branch at zero");
  schema.field("dropout", &ResNetOptions::dropout, kLastDropoutHelp).fraction();
  schema
      .field("stochastic_depth", &ResNetOptions::stochastic_depth,
             "probability that a sample skips the last block in training; it rises linearly from 0 "
             "in the first block")
      .fraction();
}

/// Options of networks with a fixed stem: without small_input.
struct CifarResNetOptions : ResNetOptions {
  static void describe(config::Schema<CifarResNetOptions>& schema) {
    describe_all_but_stem(schema);
  }
};

}  // namespace

void ResNetOptions::describe(config::Schema<ResNetOptions>& schema) {
  schema.field("small_input", &ResNetOptions::small_input,
               "a 3x3 stem without pooling, for images of about 32 x 32");
  describe_all_but_stem(schema);
}

std::shared_ptr<Model> resnet18(const ModelArgs& args, const ResNetOptions& options) {
  return ModelKind::registry().make("resnet18", &options, args);
}

std::shared_ptr<Model> resnet50(const ModelArgs& args, const ResNetOptions& options) {
  return ModelKind::registry().make("resnet50", &options, args);
}

Backbone resnet_backbone(const std::string& name, const ModelArgs& args, const ResNetStages& stages,
                         size_t dilated_stages) {
  ModelArgs pretrained = args;
  pretrained.num_classes = 1000;  // of the classifier, which torchvision draws and then drops
  auto net =
      std::make_shared<ResNet>(name, pretrained, ResNetOptions{},
                               ResNetShape{.depths = {stages.depths.begin(), stages.depths.end()},
                                           .bottleneck = stages.bottleneck,
                                           .dilated_from = stages.depths.size() - dilated_stages});
  net->unregister_module("fc");
  return {.module = net, .features = [net](const at::Tensor& x) { return net->features(x); }};
}

void add_resnets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const std::string& help,
                               const ResNetShape& shape) {
    add_network<ResNetOptions, ResNet>(registry, name, help, shape);
  };
  const std::string resnet = "ResNet (He et al., arXiv:1512.03385)";
  add("resnet18", resnet, {.depths = {2, 2, 2, 2}});
  add("resnet34", resnet, {.depths = {3, 4, 6, 3}});
  add("resnet50", resnet, {.depths = {3, 4, 6, 3}, .bottleneck = true});
  add("resnet101", resnet, {.depths = {3, 4, 23, 3}, .bottleneck = true});
  add("resnet152", resnet, {.depths = {3, 8, 36, 3}, .bottleneck = true});

  const std::string resnext = "ResNeXt (Xie et al., arXiv:1611.05431)";
  add("resnext50_32x4d", resnext,
      {.depths = {3, 4, 6, 3}, .bottleneck = true, .groups = 32, .group_width = 4});
  add("resnext101_32x8d", resnext,
      {.depths = {3, 4, 23, 3}, .bottleneck = true, .groups = 32, .group_width = 8});
  add("resnext101_64x4d", resnext,
      {.depths = {3, 4, 23, 3}, .bottleneck = true, .groups = 64, .group_width = 4});

  const std::string wide = "Wide ResNet (Zagoruyko and Komodakis, arXiv:1605.07146)";
  add("wide_resnet50_2", wide, {.depths = {3, 4, 6, 3}, .bottleneck = true, .group_width = 128});
  add("wide_resnet101_2", wide, {.depths = {3, 4, 23, 3}, .bottleneck = true, .group_width = 128});

  for (const int blocks : {3, 5, 7, 9, 18}) {  // of each stage
    const std::string name = "resnet" + std::to_string(6 * blocks + 2);
    const ResNetShape shape{
        .depths = {blocks, blocks, blocks}, .channels = 16, .small_input = true, .projects = false};
    add_network<CifarResNetOptions, ResNet>(
        registry, name,
        "ResNet for CIFAR-10 (He et al., section 4.2), with shortcuts without parameters", shape);
  }
}

}  // namespace syncbn::models

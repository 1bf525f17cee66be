// Networks for segmentation: heads on a dilated backbone, whose logits are interpolated to the
// image's size, and U-Net.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/max_pool2d.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backbones.h"
#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

constexpr int64_t kMobileNetChannels = 960;
constexpr int64_t kMobileNetAuxChannels = 40;

/// FCN's head, and the auxiliary head of all networks.
std::shared_ptr<Chain> fcn_head(int64_t in, int64_t classes, const NormFactory& norm) {
  auto head = std::make_shared<Chain>();
  head->add_conv_norm(in, in / 4, norm);
  head->add_dropout(0.1);
  head->add(conv_with_bias(in / 4, classes, 1));
  return head;
}

/// Means over a grid of cells, and a convolution.
std::shared_ptr<Chain> grid_means(int64_t grid, int64_t in, int64_t out, const NormFactory& norm) {
  auto chain = std::make_shared<Chain>();
  chain->add_step([grid](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {grid, grid}); });
  chain->add_conv_norm(in, out, norm, {.kernel = 1});
  return chain;
}

constexpr int64_t kPooledChannels = 256;  // of pyramid_pooling()

/// Atrous spatial pyramid pooling: convolutions with several dilations side by side, and the mean
/// of the image.
std::shared_ptr<Chain> pyramid_pooling(int64_t in, const NormFactory& norm,
                                       const std::vector<int64_t>& dilations) {
  const auto convs = std::make_shared<Branches>();
  convs->add(conv_norm(in, kPooledChannels, norm, {.kernel = 1}));
  for (const int64_t dilation : dilations) {
    convs->add(conv_norm(in, kPooledChannels, norm, {.dilation = dilation}));
  }
  convs->add(grid_means(1, in, kPooledChannels, norm));
  const auto project =
      conv_norm(convs->size() * kPooledChannels, kPooledChannels, norm, {.kernel = 1});
  project->add_dropout(0.5);
  auto chain = std::make_shared<Chain>();
  chain->add(convs, "convs");
  chain->add(project, "project");
  return chain;
}

std::shared_ptr<Chain> deeplab_head(int64_t in, int64_t classes, const NormFactory& norm) {
  auto head = std::make_shared<Chain>();
  head->add(pyramid_pooling(in, norm, {12, 24, 36}));
  head->add_conv_norm(kPooledChannels, kPooledChannels, norm);
  head->add(conv_with_bias(kPooledChannels, classes, 1));
  return head;
}

/// PSPNet's head: means over grids of several sizes, concatenated with their input, then
/// convolutions.
std::shared_ptr<Chain> pspnet_head(int64_t in, int64_t classes, const NormFactory& norm) {
  const std::vector<int64_t> grids = {1, 2, 3, 6};
  const auto branches = std::make_shared<Branches>(/*keeps_input=*/true);
  for (const int64_t grid : grids) {
    branches->add(grid_means(grid, in, in / std::ssize(grids), norm));
  }
  const auto means = std::make_shared<Chain>();
  means->add(branches, "branches");
  auto head = std::make_shared<Chain>();
  head->add(means);
  head->add_conv_norm(2 * in, in / 4, norm);
  head->add_dropout(0.1);
  head->add(conv_with_bias(in / 4, classes, 1));
  return head;
}

/// A head on a backbone's features, and in training an auxiliary one on the last features but one.
class SegmentationNet : public Model {
 public:
  using Head = std::function<at::Tensor(const std::vector<at::Tensor>& features)>;

  /// @param head runs `classifier`, which returns logits at a lower resolution
  /// @param aux null: none
  SegmentationNet(Backbone backbone, const std::shared_ptr<torch::nn::Module>& classifier,
                  Head head, std::shared_ptr<Chain> aux = nullptr)
      : backbone_(std::move(backbone)), head_(std::move(head)), aux_(std::move(aux)) {
    register_module("backbone", backbone_.module);
    register_module("classifier", classifier);
    if (aux_) register_module("aux_classifier", aux_);
  }

  bool labels_pixels() const override { return true; }

  at::Tensor forward(at::Tensor x) override { return forward_all(std::move(x)).front(); }

  std::vector<at::Tensor> forward_all(at::Tensor x) override {
    const std::vector<at::Tensor> features = backbone_.features(x);
    std::vector<at::Tensor> outputs = {head_(features)};
    if (aux_ && is_training()) outputs.push_back(aux_->forward(features.end()[-2]));
    for (at::Tensor& logits : outputs) logits = scaled_to(logits, x.sizes().slice(2));
    return outputs;
  }

 private:
  Backbone backbone_;
  Head head_;
  std::shared_ptr<Chain> aux_;
};

/// Lite reduced atrous spatial pyramid pooling.
class LrasppHead : public torch::nn::Module {
 public:
  LrasppHead(int64_t low, int64_t high, int64_t classes, const NormFactory& norm) {
    constexpr int64_t kChannels = 128;
    cbr_ = register_module("cbr", conv_norm(high, kChannels, norm, {.kernel = 1}));
    scale_->add_step([](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {1, 1}); });
    scale_->add(conv(high, kChannels, 1));
    scale_->add_step([](const at::Tensor& x) { return activate(x, Activation::kSigmoid); });
    register_module("scale", scale_);
    low_classifier_ = register_module("low_classifier", conv_with_bias(low, classes, 1));
    high_classifier_ = register_module("high_classifier", conv_with_bias(kChannels, classes, 1));
  }

  at::Tensor forward(const at::Tensor& low, const at::Tensor& high) {
    const at::Tensor x = cbr_->forward(high) * scale_->forward(high);
    return low_classifier_->forward(low) +
           high_classifier_->forward(scaled_to(x, low.sizes().slice(2)));
  }

 private:
  std::shared_ptr<Chain> cbr_;
  std::shared_ptr<Chain> scale_ = std::make_shared<Chain>();
  torch::nn::Conv2d low_classifier_{nullptr};
  torch::nn::Conv2d high_classifier_{nullptr};
};

/// The decoder of DeepLab V3+: pyramid pooling, and features at a higher resolution.
class DeepLabPlusHead : public torch::nn::Module {
 public:
  DeepLabPlusHead(int64_t low, int64_t high, int64_t classes, const NormFactory& norm) {
    constexpr int64_t kLow = 48;
    aspp_ = register_module("aspp", pyramid_pooling(high, norm, {6, 12, 18}));
    project_ = register_module("project", conv_norm(low, kLow, norm, {.kernel = 1}));
    classifier_->add(conv_norm(kLow + kPooledChannels, kPooledChannels, norm));
    classifier_->add(conv_norm(kPooledChannels, kPooledChannels, norm));
    classifier_->add(conv_with_bias(kPooledChannels, classes, 1));
    register_module("classifier", classifier_);
  }

  at::Tensor forward(const at::Tensor& low, const at::Tensor& high) {
    const at::Tensor x = scaled_to(aspp_->forward(high), low.sizes().slice(2));
    return classifier_->forward(at::cat({project_->forward(low), x}, 1));
  }

 private:
  std::shared_ptr<Chain> aspp_;
  std::shared_ptr<Chain> project_;
  std::shared_ptr<Chain> classifier_ = std::make_shared<Chain>();
};

/// A network with a head on the features of the highest and the lowest resolution.
/// @param low, high channels of the features of the highest resolution, and of the lowest
template <class Head>
std::shared_ptr<Model> with_two_depths(const Backbone& backbone, const ModelArgs& args, int64_t low,
                                       int64_t high) {
  const auto head = std::make_shared<Head>(low, high, args.num_classes, NormFactory(args));
  return std::make_shared<SegmentationNet>(
      backbone, head, [head](const std::vector<at::Tensor>& features) {
        return head->forward(features.front(), features.back());
      });
}

struct UNetOptions {
  int64_t width = 64;

  static void describe(config::Schema<UNetOptions>& schema) {
    schema
        .field("width", &UNetOptions::width,
               "channels at the images' resolution; each halving of it doubles them")
        .between(1, 1024);
  }
};

/// Two convolutions at each resolution, down to 1/16 and up again.
class UNet : public Model {
 public:
  UNet(const std::string& name, const ModelArgs& args, const UNetOptions& options) {
    constexpr int kHalvings = 4;
    const int64_t width = options.width;
    refuse_recomputation(name, args);
    const NormFactory norm(args);
    int64_t in = image_channels(name, args, int64_t{1} << kHalvings);
    const auto encoder = register_module("encoder", std::make_shared<Chain>());
    const auto up = register_module("up", std::make_shared<Chain>());
    const auto decoder = register_module("decoder", std::make_shared<Chain>());
    for (int i = 0; i <= kHalvings; ++i) {
      encoder_.push_back(encoder->add(two_convs(in, width << i, norm)));
      in = width << i;
    }
    for (int i = kHalvings; i-- > 0; in = width << i) {
      up_.push_back(up->add(torch::nn::ConvTranspose2d(
          torch::nn::ConvTranspose2dOptions(in, width << i, 2).stride(2))));
      decoder_.push_back(decoder->add(two_convs(in, width << i, norm)));
    }
    classifier_ = register_module("classifier", conv_with_bias(in, args.num_classes, 1));
  }

  bool labels_pixels() const override { return true; }

  at::Tensor forward(at::Tensor x) override {
    std::vector<at::Tensor> skipped;
    for (const auto& level : encoder_) {
      if (!skipped.empty()) x = at::max_pool2d(x, 2);
      x = level->forward(x);
      skipped.push_back(x);
    }
    skipped.pop_back();
    for (size_t i = 0; i < decoder_.size(); ++i) {
      x = up_[i]->forward(x);
      const at::Tensor& skip = skipped.back();
      // Pads, because pooling rounded odd sizes down.
      x = at::constant_pad_nd(x, {0, skip.size(3) - x.size(3), 0, skip.size(2) - x.size(2)});
      x = decoder_[i]->forward(at::cat({skip, x}, 1));
      skipped.pop_back();
    }
    return classifier_->forward(x);
  }

 private:
  static std::shared_ptr<Chain> two_convs(int64_t in, int64_t out, const NormFactory& norm) {
    auto chain = std::make_shared<Chain>();
    chain->add(conv_norm(in, out, norm));
    chain->add(conv_norm(out, out, norm));
    return chain;
  }

  std::vector<std::shared_ptr<Chain>> encoder_;
  std::vector<torch::nn::ConvTranspose2d> up_;
  std::vector<std::shared_ptr<Chain>> decoder_;
  torch::nn::Conv2d classifier_{nullptr};
};

struct AuxOptions {
  bool aux_loss = false;

  static void describe(config::Schema<AuxOptions>& schema) {
    schema.field("aux_loss", &AuxOptions::aux_loss,
                 "in training, a second head on earlier features (weight: task.aux_weight)");
  }
};

struct NoOptions {
  static void describe(config::Schema<NoOptions>& /*schema*/) {}
};

using MakeHead = std::shared_ptr<Chain> (*)(int64_t in, int64_t classes, const NormFactory& norm);

/// A head on the last features, and an auxiliary one on the previous features.
/// @param channels, aux_channels of these features
std::shared_ptr<Model> fcn_like(const Backbone& backbone, const ModelArgs& args,
                                const AuxOptions& options, MakeHead make_head, int64_t channels,
                                int64_t aux_channels) {
  const NormFactory norm(args);
  // In torchvision's order of random draws.
  const auto aux = options.aux_loss ? fcn_head(aux_channels, args.num_classes, norm) : nullptr;
  const auto head = make_head(channels, args.num_classes, norm);
  const auto run = [head](const std::vector<at::Tensor>& features) {
    return head->forward(features.back());
  };
  return std::make_shared<SegmentationNet>(backbone, head, run, aux);
}

std::shared_ptr<Model> with_resnet(const std::string& name, const ModelArgs& args,
                                   const AuxOptions& options, const ResNetStages& stages,
                                   MakeHead make_head) {
  return fcn_like(resnet_backbone(name, args, stages, /*dilated_stages=*/2), args, options,
                  make_head, stages.channels()[3], stages.channels()[2]);
}

std::shared_ptr<Model> deeplab_with_mobilenet(const std::string& name, const ModelArgs& args,
                                              const AuxOptions& options) {
  return fcn_like(dilated_mobilenet_v3_large(name, args), args, options, deeplab_head,
                  kMobileNetChannels, kMobileNetAuxChannels);
}

std::shared_ptr<Model> deeplab_plus(const std::string& name, const ModelArgs& args,
                                    const NoOptions& /*options*/, const ResNetStages& stages) {
  return with_two_depths<DeepLabPlusHead>(resnet_backbone(name, args, stages, /*dilated_stages=*/1),
                                          args, stages.channels()[0], stages.channels()[3]);
}

std::shared_ptr<Model> lraspp(const std::string& name, const ModelArgs& args,
                              const NoOptions& /*options*/) {
  return with_two_depths<LrasppHead>(dilated_mobilenet_v3_large(name, args), args,
                                     kMobileNetAuxChannels, kMobileNetChannels);
}

}  // namespace

void add_segmentation_networks(ModelKind::Registry& registry) {
  const std::string deeplab = "DeepLab V3 (Chen et al., arXiv:1706.05587)";
  const auto add_resnets = [&](const std::string& suffix, const ResNetStages& stages) {
    const auto add = [&](const std::string& name, const std::string& help, MakeHead make_head) {
      add_model<AuxOptions>(registry, name + suffix, help, with_resnet, stages, make_head);
    };
    add("fcn_", "FCN (Long et al., arXiv:1411.4038)", fcn_head);
    add("deeplabv3_", deeplab, deeplab_head);
    add("pspnet_", "PSPNet (Zhao et al., arXiv:1612.01105)", pspnet_head);
    add_model<NoOptions>(registry, "deeplabv3plus_" + suffix,
                         "DeepLab V3+ (Chen et al., arXiv:1802.02611)", deeplab_plus, stages);
  };
  add_resnets("resnet50", kResNet50);
  add_resnets("resnet101", kResNet101);
  add_network<UNetOptions, UNet>(registry, "unet",
                                 "U-Net (Ronneberger et al., arXiv:1505.04597), with batch norm");
  add_model<AuxOptions>(registry, "deeplabv3_mobilenet_v3_large", deeplab, deeplab_with_mobilenet);
  add_model<NoOptions>(registry, "lraspp_mobilenet_v3_large",
                       "LR-ASPP (Howard et al., arXiv:1905.02244)", lraspp);
}

}  // namespace syncbn::models

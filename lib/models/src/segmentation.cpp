// Networks that label pixels: a dilated backbone, and heads whose logits are scaled up to the size
// of the image.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/upsample_bilinear2d.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backbones.h"
#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

constexpr int64_t kResNetChannels = 2048;
constexpr int64_t kResNetAuxChannels = 1024;
constexpr int64_t kMobileNetChannels = 960;
constexpr int64_t kMobileNetAuxChannels = 40;

at::Tensor scaled_to(const at::Tensor& x, at::IntArrayRef size) {
  return at::upsample_bilinear2d(x, size, /*align_corners=*/false);
}

torch::nn::Conv2d classifier(int64_t in, int64_t classes) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, classes, 1));
}

/// The head of FCN, and the auxiliary head of all.
std::shared_ptr<Chain> fcn_head(int64_t in, int64_t classes, const NormFactory& norm) {
  auto head = std::make_shared<Chain>();
  head->add(conv(in, in / 4, 3));
  head->add_norm(norm, in / 4, Activation::kRelu);
  head->add_dropout(0.1);
  head->add(classifier(in / 4, classes));
  return head;
}

/// Atrous spatial pyramid pooling: convolutions with several dilations side by side, and the mean
/// of the image.
class PyramidPooling : public torch::nn::Module {
 public:
  static constexpr int64_t kChannels = 256;

  PyramidPooling(int64_t in, const NormFactory& norm) {
    add(conv_norm(in, kChannels, norm, {.kernel = 1}));
    for (const int64_t dilation : {12, 24, 36}) {
      add(conv_norm(in, kChannels, norm, {.dilation = dilation}));
    }
    auto mean = std::make_shared<Chain>();
    mean->add_step([](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {1, 1}); });
    mean->add(conv(in, kChannels, 1));
    mean->add_norm(norm, kChannels, Activation::kRelu);
    add(mean);
    register_module("convs", convs_);
    const auto branches = static_cast<int64_t>(branches_.size());
    project_ = conv_norm(branches * kChannels, kChannels, norm, {.kernel = 1});
    project_->add_dropout(0.5);
    register_module("project", project_);
  }

  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> outputs;
    for (const auto& branch : branches_) outputs.push_back(branch->forward(x));
    outputs.back() = scaled_to(outputs.back(), x.sizes().slice(2));
    return project_->forward(at::cat(outputs, 1));
  }

 private:
  void add(std::shared_ptr<Chain> branch) {
    convs_->add_name(branch);
    branches_.push_back(std::move(branch));
  }

  std::vector<std::shared_ptr<Chain>> branches_;
  std::shared_ptr<Chain> convs_ = std::make_shared<Chain>();  ///< for the names
  std::shared_ptr<Chain> project_;
};

std::shared_ptr<Chain> deeplab_head(int64_t in, int64_t classes, const NormFactory& norm) {
  constexpr int64_t kChannels = PyramidPooling::kChannels;
  auto head = std::make_shared<Chain>();
  head->add(std::make_shared<PyramidPooling>(in, norm));
  head->add(conv(kChannels, kChannels, 3));
  head->add_norm(norm, kChannels, Activation::kRelu);
  head->add(classifier(kChannels, classes));
  return head;
}

class SegmentationNet : public Model {
 public:
  explicit SegmentationNet(Backbone backbone) : backbone_(std::move(backbone)) {
    register_module("backbone", backbone_.module);
  }

  bool labels_pixels() const override { return true; }

  at::Tensor forward(at::Tensor x) override { return forward_all(std::move(x)).front(); }

  std::vector<at::Tensor> forward_all(at::Tensor x) override {
    std::vector<at::Tensor> outputs = heads(backbone_.features(x));
    for (at::Tensor& logits : outputs) logits = scaled_to(logits, x.sizes().slice(2));
    return outputs;
  }

 protected:
  /// Logits in a lower resolution, in the order of forward_all().
  virtual std::vector<at::Tensor> heads(const std::vector<at::Tensor>& features) = 0;

 private:
  Backbone backbone_;
};

/// One head, and in training an auxiliary one on earlier features.
class FcnLike : public SegmentationNet {
 public:
  /// @param aux null: none
  FcnLike(Backbone backbone, std::shared_ptr<Chain> head, std::shared_ptr<Chain> aux)
      : SegmentationNet(std::move(backbone)),
        head_(register_module("classifier", std::move(head))),
        aux_(std::move(aux)) {
    if (aux_) register_module("aux_classifier", aux_);
  }

 protected:
  std::vector<at::Tensor> heads(const std::vector<at::Tensor>& features) override {
    std::vector<at::Tensor> outputs = {head_->forward(features.back())};
    if (aux_ && is_training()) outputs.push_back(aux_->forward(features.end()[-2]));
    return outputs;
  }

 private:
  std::shared_ptr<Chain> head_;
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
    low_classifier_ = register_module("low_classifier", classifier(low, classes));
    high_classifier_ = register_module("high_classifier", classifier(kChannels, classes));
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

class Lraspp : public SegmentationNet {
 public:
  Lraspp(Backbone backbone, std::shared_ptr<LrasppHead> head)
      : SegmentationNet(std::move(backbone)),
        head_(register_module("classifier", std::move(head))) {}

 protected:
  std::vector<at::Tensor> heads(const std::vector<at::Tensor>& features) override {
    return {head_->forward(features.end()[-2], features.back())};
  }

 private:
  std::shared_ptr<LrasppHead> head_;
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

}  // namespace

void add_segmentation_networks(ModelKind::Registry& registry) {
  // Heads are made in torchvision's order, which is that of the random draws.
  const auto add_resnets = [&registry](const std::string& prefix, const std::string& help,
                                       MakeHead make_head) {
    for (const auto& [suffix, depths] : std::vector<std::pair<std::string, std::vector<int>>>{
             {"resnet50", {3, 4, 6, 3}}, {"resnet101", {3, 4, 23, 3}}}) {
      const std::string name = prefix + suffix;
      registry.add<AuxOptions>(
          name, help,
          [name, depths = depths, make_head](const AuxOptions& options, const ModelArgs& args) {
            const NormFactory norm(args);
            const int64_t classes = args.num_classes;
            const Backbone backbone = dilated_resnet(name, args, depths);
            const auto aux =
                options.aux_loss ? fcn_head(kResNetAuxChannels, classes, norm) : nullptr;
            return std::make_shared<FcnLike>(backbone, make_head(kResNetChannels, classes, norm),
                                             aux);
          });
    }
  };
  add_resnets("fcn_", "FCN (Long et al., arXiv:1411.4038)", fcn_head);
  const std::string deeplab = "DeepLab V3 (Chen et al., arXiv:1706.05587)";
  add_resnets("deeplabv3_", deeplab, deeplab_head);
  registry.add<AuxOptions>(
      "deeplabv3_mobilenet_v3_large", deeplab,
      [](const AuxOptions& options, const ModelArgs& args) {
        const NormFactory norm(args);
        const int64_t classes = args.num_classes;
        const Backbone backbone = dilated_mobilenet_v3_large("deeplabv3_mobilenet_v3_large", args);
        const auto aux =
            options.aux_loss ? fcn_head(kMobileNetAuxChannels, classes, norm) : nullptr;
        return std::make_shared<FcnLike>(backbone, deeplab_head(kMobileNetChannels, classes, norm),
                                         aux);
      });
  registry.add<NoOptions>(
      "lraspp_mobilenet_v3_large", "LR-ASPP (Howard et al., arXiv:1905.02244)",
      [](const NoOptions& /*options*/, const ModelArgs& args) {
        const Backbone backbone = dilated_mobilenet_v3_large("lraspp_mobilenet_v3_large", args);
        return std::make_shared<Lraspp>(
            backbone, std::make_shared<LrasppHead>(kMobileNetAuxChannels, kMobileNetChannels,
                                                   args.num_classes, NormFactory(args)));
      });
}

}  // namespace syncbn::models

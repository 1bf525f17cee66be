#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

/// Two hidden layers and the output layer. VGG applies dropout after each hidden layer, AlexNet
/// before.
std::shared_ptr<Chain> hidden_layers(int64_t in, int64_t classes, const DropoutOptions& options,
                                     bool drops_first) {
  constexpr int64_t kHidden = 4096;
  const double dropout = options.dropout.value_or(0.5);
  auto classifier = std::make_shared<Chain>();
  for (const int64_t features : {in, kHidden}) {
    if (drops_first) classifier->add_dropout(dropout);
    classifier->add(torch::nn::Linear(features, kHidden));
    classifier->add_relu();
    if (!drops_first) classifier->add_dropout(dropout);
  }
  classifier->add(torch::nn::Linear(kHidden, classes));
  return classifier;
}

/// Five stages of 3x3 convolutions, each of which halves the resolution at its end.
/// @param depths convolutions of each stage
std::shared_ptr<Model> vgg(const std::string& name, const ModelArgs& args,
                           const DropoutOptions& options, const std::vector<int>& depths,
                           bool batch_norm) {
  refuse_recomputation(name, args);
  int64_t in = image_channels(name, args, 32);
  const NormFactory norm(args);
  auto features = std::make_shared<Chain>();
  for (size_t stage = 0; stage < depths.size(); ++stage) {
    const int64_t out = stage < 3 ? int64_t{64} << stage : 512;
    for (int i = 0; i < depths[stage]; ++i) {
      features->add(conv_with_bias(in, out, 3));
      if (batch_norm) {
        features->add_norm(norm, out, Activation::kRelu);
      } else {
        features->add_relu();
      }
      in = out;
    }
    features->add_max_pool(2, 2);
  }
  constexpr int64_t kPooled = 7;
  auto net = std::make_shared<FeatureNet>(
      features, kPooled,
      hidden_layers(in * kPooled * kPooled, args.num_classes, options, /*drops_first=*/false));
  init_layers(*net, kaiming_init(), normal_init(0.01));
  return net;
}

std::shared_ptr<Model> alexnet(const std::string& name, const ModelArgs& args,
                               const DropoutOptions& options) {
  refuse_recomputation(name, args);
  const int64_t channels = image_channels(name, args, 63);
  auto features = std::make_shared<Chain>();
  const auto add = [&features](int64_t in, int64_t out, int64_t kernel, int64_t stride,
                               int64_t padding, bool pools) {
    features->add(conv_with_bias(in, out, kernel, stride, padding));
    features->add_relu();
    if (pools) features->add_max_pool(3, 2);
  };
  add(channels, 64, 11, 4, 2, /*pools=*/true);
  add(64, 192, 5, 1, 2, /*pools=*/true);
  add(192, 384, 3, 1, 1, /*pools=*/false);
  add(384, 256, 3, 1, 1, /*pools=*/false);
  add(256, 256, 3, 1, 1, /*pools=*/true);
  constexpr int64_t kPooled = 6;
  return std::make_shared<FeatureNet>(
      features, kPooled,
      hidden_layers(256 * kPooled * kPooled, args.num_classes, options, /*drops_first=*/true));
}

}  // namespace

void add_vggs(ModelKind::Registry& registry) {
  const std::string help = "VGG (Simonyan and Zisserman, arXiv:1409.1556), _bn with batch norm";
  const auto add = [&](const std::string& name, const std::vector<int>& depths, bool batch_norm) {
    add_model<DropoutOptions>(registry, name, help, vgg, depths, batch_norm);
  };
  for (const bool batch_norm : {false, true}) {
    const std::string suffix = batch_norm ? "_bn" : "";
    add("vgg11" + suffix, {1, 1, 2, 2, 2}, batch_norm);
    add("vgg13" + suffix, {2, 2, 2, 2, 2}, batch_norm);
    add("vgg16" + suffix, {2, 2, 3, 3, 3}, batch_norm);
    add("vgg19" + suffix, {2, 2, 4, 4, 4}, batch_norm);
  }
  add_model<DropoutOptions>(registry, "alexnet", "AlexNet (Krizhevsky, arXiv:1404.5997)", alexnet);
}

}  // namespace syncbn::models

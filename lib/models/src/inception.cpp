// GoogLeNet (Inception v1) and Inception v3: blocks of branches side by side, and auxiliary
// classifiers in training.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

using Kernel = std::array<int64_t, 2>;  // height, width

constexpr Kernel square(int64_t side) {
  return {side, side};
}

/// The padding that keeps the resolution at stride 1.
constexpr Kernel same(const Kernel& kernel) {
  return {kernel[0] / 2, kernel[1] / 2};
}

/// A convolution, batch norm and ReLU.
std::shared_ptr<Chain> basic_conv(int64_t in, int64_t out, const NormFactory& norm,
                                  const Kernel& kernel, int64_t stride = 1,
                                  const Kernel& padding = {0, 0}) {
  auto chain = std::make_shared<Chain>();
  chain->add(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, {kernel[0], kernel[1]})
                                   .stride(stride)
                                   .padding({padding[0], padding[1]})
                                   .bias(false)),
             "conv");
  chain->add_norm(norm, out, Activation::kRelu, "bn");
  return chain;
}

/// A network with auxiliary classifiers between its layers.
class InceptionNet : public Model {
 public:
  InceptionNet(const ModelArgs& args, double dropout)
      : recomputes_(args.activation_checkpointing), dropout_(dropout) {
    start_part();
  }

  template <class Layer>
  void add(const std::string& name, const Layer& layer) {
    parts_.back()->add(register_module(name, layer));
  }

  void add_max_pool(int64_t kernel, bool ceil_mode) {
    parts_.back()->add_max_pool(kernel, 2, 0, ceil_mode);
  }

  /// Begins a part: an auxiliary classifier can branch off before it.
  void start_part() { parts_.push_back(std::make_shared<Chain>(recomputes_)); }

  /// Adds a classifier after the first part that has none.
  void add_aux(const std::string& name, const std::shared_ptr<Chain>& classifier) {
    aux_.push_back(register_module(name, classifier));
  }

  void add_classifier(int64_t in, int64_t classes) {
    fc_ = register_module("fc", torch::nn::Linear(in, classes));
  }

  at::Tensor forward(at::Tensor x) override { return forward_all(std::move(x)).front(); }

  std::vector<at::Tensor> forward_all(at::Tensor x) override {
    std::vector<at::Tensor> outputs(1);
    for (size_t i = 0; i < parts_.size(); ++i) {
      x = parts_[i]->forward(x);
      if (is_training() && i < aux_.size()) outputs.push_back(aux_[i]->forward(x));
    }
    x = at::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
    outputs[0] = fc_->forward(at::dropout(x, dropout_, is_training()));
    return outputs;
  }

 private:
  bool recomputes_;
  double dropout_;
  std::vector<std::shared_ptr<Chain>> parts_;  ///< the network, not a part, registers their modules
  std::vector<std::shared_ptr<Chain>> aux_;
  torch::nn::Linear fc_{nullptr};
};

/// Draws weights like torchvision: biases keep torch's initial values.
/// @param std_of returns the standard deviation for a module
template <class StdOf>
void draw_weights(const torch::nn::Module& net, const StdOf& std_of) {
  for (const auto& item : net.named_modules("", /*include_self=*/false)) {
    const auto& module = item.value();
    if (module->as<torch::nn::Conv2d>() == nullptr && module->as<torch::nn::Linear>() == nullptr) {
      continue;
    }
    truncated_normal_init(std_of(item.key()))(module->named_parameters(false)["weight"]);
  }
}

// ---- GoogLeNet --------------------------------------------------------------------------------

struct ChannelsV1 {
  int64_t in, direct, before_3x3, after_3x3, before_5x5, after_5x5, pooled;
  int64_t out() const { return direct + after_3x3 + after_5x5 + pooled; }
};

/// Four branches: 1x1; 3x3; a second 3x3 (5x5 in the paper); pooling.
std::shared_ptr<Branches> block_v1(const ChannelsV1& channels, const NormFactory& norm) {
  auto block = std::make_shared<Branches>();
  block->add(basic_conv(channels.in, channels.direct, norm, square(1)), "branch1");
  const auto add = [&](const std::string& name, int64_t before, int64_t after) {
    auto branch = std::make_shared<Chain>();
    branch->add(basic_conv(channels.in, before, norm, square(1)));
    branch->add(basic_conv(before, after, norm, square(3), 1, square(1)));
    block->add(branch, name);
  };
  add("branch2", channels.before_3x3, channels.after_3x3);
  add("branch3", channels.before_5x5, channels.after_5x5);
  auto pooling = std::make_shared<Chain>();
  pooling->add_max_pool(3, 1, 1, /*ceil_mode=*/true);
  pooling->add(basic_conv(channels.in, channels.pooled, norm, square(1)));
  block->add(pooling, "branch4");
  return block;
}

std::shared_ptr<Chain> aux_of_v1(int64_t in, int64_t classes, double dropout,
                                 const NormFactory& norm) {
  auto aux = std::make_shared<Chain>();
  aux->add_step([](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {4, 4}); });
  aux->add(basic_conv(in, 128, norm, square(1)), "conv");
  aux->add_step([](const at::Tensor& x) { return x.flatten(1); });
  aux->add(torch::nn::Linear(2048, 1024), "fc1");
  aux->add_relu();
  aux->add_dropout(dropout);
  aux->add(torch::nn::Linear(1024, classes), "fc2");
  return aux;
}

struct InceptionOptions {
  bool aux_logits = true;
  double dropout = 0.5;

  template <class Options>
  static void describe(config::Schema<Options>& schema) {
    schema.field("aux_logits", &InceptionOptions::aux_logits,
                 "in training, classifiers on earlier features (weight: task.aux_weight)");
    schema.field("dropout", &InceptionOptions::dropout, kLastDropoutHelp).fraction();
  }
};

struct GoogLeNetOptions : InceptionOptions {
  double dropout_aux = 0.7;

  GoogLeNetOptions() { dropout = 0.2; }

  static void describe(config::Schema<GoogLeNetOptions>& schema) {
    InceptionOptions::describe(schema);
    schema
        .field("dropout_aux", &GoogLeNetOptions::dropout_aux,
               "the same in the auxiliary classifiers")
        .fraction();
  }
};

std::shared_ptr<Model> googlenet(const std::string& name, const ModelArgs& args,
                                 const GoogLeNetOptions& options) {
  const int64_t channels = image_channels(name, args, 15);
  const NormFactory norm(args, /*eps=*/1e-3);
  auto net = std::make_shared<InceptionNet>(args, options.dropout);
  net->add("conv1", basic_conv(channels, 64, norm, square(7), 2, square(3)));
  net->add_max_pool(3, /*ceil_mode=*/true);
  net->add("conv2", basic_conv(64, 64, norm, square(1)));
  net->add("conv3", basic_conv(64, 192, norm, square(3), 1, square(1)));
  net->add_max_pool(3, /*ceil_mode=*/true);
  int64_t in = 192;
  const auto add = [&](const std::string& part, ChannelsV1 block) {
    block.in = in;
    net->add(part, block_v1(block, norm));
    in = block.out();
  };
  add("inception3a", {0, 64, 96, 128, 16, 32, 32});
  add("inception3b", {0, 128, 128, 192, 32, 96, 64});
  net->add_max_pool(3, /*ceil_mode=*/true);
  add("inception4a", {0, 192, 96, 208, 16, 48, 64});
  const int64_t in_aux1 = in;
  net->start_part();
  add("inception4b", {0, 160, 112, 224, 24, 64, 64});
  add("inception4c", {0, 128, 128, 256, 24, 64, 64});
  add("inception4d", {0, 112, 144, 288, 32, 64, 64});
  const int64_t in_aux2 = in;
  net->start_part();
  add("inception4e", {0, 256, 160, 320, 32, 128, 128});
  net->add_max_pool(2, /*ceil_mode=*/true);
  add("inception5a", {0, 256, 160, 320, 32, 128, 128});
  add("inception5b", {0, 384, 192, 384, 48, 128, 128});
  if (options.aux_logits) {
    net->add_aux("aux1", aux_of_v1(in_aux1, args.num_classes, options.dropout_aux, norm));
    net->add_aux("aux2", aux_of_v1(in_aux2, args.num_classes, options.dropout_aux, norm));
  }
  net->add_classifier(in, args.num_classes);
  draw_weights(*net, [](const std::string& /*part*/) { return 0.01; });
  return net;
}

// ---- Inception v3 -----------------------------------------------------------------------------

/// Branches of convolutions, which are registered one by one, and a branch that pools.
class BlockV3Inception : public torch::nn::Module {
 public:
  struct Layer {
    std::string name;
    int64_t out;
    Kernel kernel;
    int64_t stride = 1;
  };

  BlockV3Inception(int64_t in, const NormFactory& norm) : in_(in), norm_(norm) {}

  /// @param fork the last two layers have the same input, and both are outputs
  void add(const std::vector<Layer>& layers, bool fork = false) {
    Branch branch{.fork = fork};
    int64_t in = in_;
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      const Kernel padding = layer.stride > 1 ? Kernel{0, 0} : same(layer.kernel);
      branch.layers.push_back(register_module(
          layer.name, basic_conv(in, layer.out, norm_, layer.kernel, layer.stride, padding)));
      const bool is_output = i + 1 == layers.size() || (fork && i + 2 == layers.size());
      if (is_output) {
        out_ += layer.out;
      } else {
        in = layer.out;
      }
    }
    branches_.push_back(std::move(branch));
  }

  /// A mean over 3 x 3 values, and a 1x1 convolution.
  void add_mean_pool(int64_t out) {
    pool_ = register_module("branch_pool", basic_conv(in_, out, norm_, square(1)));
    out_ += out;
  }

  /// A maximum over 3 x 3 values of stride 2.
  void add_max_pool() { out_ += in_; }

  int64_t out() const { return out_; }

  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> outputs;
    for (const auto& [layers, fork] : branches_) {
      at::Tensor y = x;
      const size_t in_row = layers.size() - (fork ? 2 : 0);
      for (size_t i = 0; i < in_row; ++i) y = layers[i]->forward(y);
      if (!fork) outputs.push_back(y);
      for (size_t i = in_row; i < layers.size(); ++i) outputs.push_back(layers[i]->forward(y));
    }
    outputs.push_back(pool_ ? pool_->forward(at::avg_pool2d(x, 3, 1, 1)) : at::max_pool2d(x, 3, 2));
    return at::cat(outputs, 1);
  }

 private:
  struct Branch {
    std::vector<std::shared_ptr<Chain>> layers = {};
    bool fork = false;
  };

  int64_t in_;
  int64_t out_ = 0;
  NormFactory norm_;
  std::vector<Branch> branches_;
  std::shared_ptr<Chain> pool_;  ///< null: the maximum
};

using BlockPtr = std::shared_ptr<BlockV3Inception>;

constexpr Kernel kRow = {1, 7};
constexpr Kernel kColumn = {7, 1};

BlockPtr block_a(int64_t in, int64_t pooled, const NormFactory& norm) {
  auto block = std::make_shared<BlockV3Inception>(in, norm);
  block->add({{"branch1x1", 64, square(1)}});
  block->add({{"branch5x5_1", 48, square(1)}, {"branch5x5_2", 64, square(5)}});
  block->add({{"branch3x3dbl_1", 64, square(1)},
              {"branch3x3dbl_2", 96, square(3)},
              {"branch3x3dbl_3", 96, square(3)}});
  block->add_mean_pool(pooled);
  return block;
}

/// Halves the resolution.
BlockPtr block_b(int64_t in, const NormFactory& norm) {
  auto block = std::make_shared<BlockV3Inception>(in, norm);
  block->add({{"branch3x3", 384, square(3), 2}});
  block->add({{"branch3x3dbl_1", 64, square(1)},
              {"branch3x3dbl_2", 96, square(3)},
              {"branch3x3dbl_3", 96, square(3), 2}});
  block->add_max_pool();
  return block;
}

/// @param width channels inside
BlockPtr block_c(int64_t in, int64_t width, const NormFactory& norm) {
  auto block = std::make_shared<BlockV3Inception>(in, norm);
  block->add({{"branch1x1", 192, square(1)}});
  block->add({{"branch7x7_1", width, square(1)},
              {"branch7x7_2", width, kRow},
              {"branch7x7_3", 192, kColumn}});
  block->add({{"branch7x7dbl_1", width, square(1)},
              {"branch7x7dbl_2", width, kColumn},
              {"branch7x7dbl_3", width, kRow},
              {"branch7x7dbl_4", width, kColumn},
              {"branch7x7dbl_5", 192, kRow}});
  block->add_mean_pool(192);
  return block;
}

/// Halves the resolution.
BlockPtr block_d(int64_t in, const NormFactory& norm) {
  auto block = std::make_shared<BlockV3Inception>(in, norm);
  block->add({{"branch3x3_1", 192, square(1)}, {"branch3x3_2", 320, square(3), 2}});
  block->add({{"branch7x7x3_1", 192, square(1)},
              {"branch7x7x3_2", 192, kRow},
              {"branch7x7x3_3", 192, kColumn},
              {"branch7x7x3_4", 192, square(3), 2}});
  block->add_max_pool();
  return block;
}

BlockPtr block_e(int64_t in, const NormFactory& norm) {
  auto block = std::make_shared<BlockV3Inception>(in, norm);
  block->add({{"branch1x1", 320, square(1)}});
  block->add({{"branch3x3_1", 384, square(1)},
              {"branch3x3_2a", 384, {1, 3}},
              {"branch3x3_2b", 384, {3, 1}}},
             /*fork=*/true);
  block->add({{"branch3x3dbl_1", 448, square(1)},
              {"branch3x3dbl_2", 384, square(3)},
              {"branch3x3dbl_3a", 384, {1, 3}},
              {"branch3x3dbl_3b", 384, {3, 1}}},
             /*fork=*/true);
  block->add_mean_pool(192);
  return block;
}

std::shared_ptr<Chain> aux_of_v3(int64_t in, int64_t classes, const NormFactory& norm) {
  auto aux = std::make_shared<Chain>();
  aux->add_step([](const at::Tensor& x) { return at::avg_pool2d(x, 5, 3); });
  aux->add(basic_conv(in, 128, norm, square(1)), "conv0");
  aux->add(basic_conv(128, 768, norm, square(5)), "conv1");
  aux->add_step([](const at::Tensor& x) { return at::adaptive_avg_pool2d(x, {1, 1}).flatten(1); });
  aux->add(torch::nn::Linear(768, classes), "fc");
  return aux;
}

std::shared_ptr<Model> inception_v3(const std::string& name, const ModelArgs& args,
                                    const InceptionOptions& options) {
  // The auxiliary classifier needs 17 x 17 features.
  const int64_t channels = image_channels(name, args, options.aux_logits ? 299 : 75);
  const NormFactory norm(args, /*eps=*/1e-3);
  auto net = std::make_shared<InceptionNet>(args, options.dropout);
  net->add("Conv2d_1a_3x3", basic_conv(channels, 32, norm, square(3), 2));
  net->add("Conv2d_2a_3x3", basic_conv(32, 32, norm, square(3)));
  net->add("Conv2d_2b_3x3", basic_conv(32, 64, norm, square(3), 1, square(1)));
  net->add_max_pool(3, /*ceil_mode=*/false);
  net->add("Conv2d_3b_1x1", basic_conv(64, 80, norm, square(1)));
  net->add("Conv2d_4a_3x3", basic_conv(80, 192, norm, square(3)));
  net->add_max_pool(3, /*ceil_mode=*/false);
  int64_t in = 192;
  const auto add = [&](const std::string& part, const BlockPtr& block) {
    net->add(part, block);
    in = block->out();
  };
  add("Mixed_5b", block_a(in, 32, norm));
  add("Mixed_5c", block_a(in, 64, norm));
  add("Mixed_5d", block_a(in, 64, norm));
  add("Mixed_6a", block_b(in, norm));
  add("Mixed_6b", block_c(in, 128, norm));
  add("Mixed_6c", block_c(in, 160, norm));
  add("Mixed_6d", block_c(in, 160, norm));
  add("Mixed_6e", block_c(in, 192, norm));
  if (options.aux_logits) net->add_aux("AuxLogits", aux_of_v3(in, args.num_classes, norm));
  net->start_part();
  add("Mixed_7a", block_d(in, norm));
  add("Mixed_7b", block_e(in, norm));
  add("Mixed_7c", block_e(in, norm));
  net->add_classifier(in, args.num_classes);
  draw_weights(*net, [](const std::string& part) { return part == "AuxLogits.fc" ? 0.001 : 0.1; });
  return net;
}

}  // namespace

void add_inceptions(ModelKind::Registry& registry) {
  add_model<GoogLeNetOptions>(registry, "googlenet", "GoogLeNet (Szegedy et al., arXiv:1409.4842)",
                              googlenet);
  add_model<InceptionOptions>(registry, "inception_v3",
                              "Inception v3 (Szegedy et al., arXiv:1512.00567)", inception_v3);
}

}  // namespace syncbn::models

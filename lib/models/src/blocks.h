#pragma once

// Building blocks that several families of networks share.

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/modules/conv.h>

#include <syncbn/models/model.h>
#include <syncbn/models/norm.h>

namespace syncbn::models {

/// The number of channels of the samples that a model is made for.
/// @throws base::UserError naming the model if the samples are not images of at least `min_side` x
///   `min_side` pixels, or if there is no class.
int64_t image_channels(const std::string& model, const ModelArgs& args, int64_t min_side);

/// @throws base::UserError if `args` ask for activation checkpointing.
void refuse_recomputation(const std::string& model, const ModelArgs& args);

/// `channels` rounded to the nearest multiple of `divisor`, at least one, or to the next larger one
/// if that removes more than a tenth (Howard et al., arXiv:1704.04861).
int64_t make_divisible(double channels, int64_t divisor = 8);

enum class Activation { kNone, kRelu, kRelu6, kHardswish, kSilu, kSigmoid, kHardsigmoid };

/// @param x may be changed in place
at::Tensor activate(at::Tensor x, Activation activation);

/// A square convolution without bias that keeps the size at stride 1.
torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1,
                       int64_t groups = 1, int64_t dilation = 1);

/// A square convolution with bias.
/// @param padding empty: as conv()
torch::nn::Conv2d conv_with_bias(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1,
                                 std::optional<int64_t> padding = {});

/// Stochastic depth (Huang et al., arXiv:1603.09382): zeroes each sample with `probability`, and
/// scales the others to keep the expected value.
at::Tensor drop_path(const at::Tensor& x, double probability);

struct ConvNormOptions {
  int64_t kernel = 3;
  int64_t stride = 1;
  int64_t groups = 1;
  Activation activation = Activation::kRelu;
  int64_t dilation = 1;
};

/// A sequence of layers, named by numbers as in torch.nn.Sequential: layers without parameters
/// count as well.
class Chain : public torch::nn::Module {
 public:
  using Step = std::function<at::Tensor(const at::Tensor&)>;

  /// @param recompute run each layer through dist::checkpoint()
  explicit Chain(bool recompute = false) : recompute_(recompute) {}

  /// @param layer a module holder, or a pointer to a module
  /// @param name instead of the number
  template <class Layer>
  Layer add(Layer layer, const std::string& name = {}) {
    add_name(layer, name);
    steps_.emplace_back([layer](const at::Tensor& x) mutable { return layer->forward(x); });
    return layer;
  }

  /// A layer without parameters.
  void add_step(Step step);
  void add_relu();  ///< may change its input in place
  void add_dropout(double probability);
  void add_max_pool(int64_t kernel, int64_t stride, int64_t padding = 0, bool ceil_mode = false);

  /// Batch norm, followed by the activation as a second layer.
  void add_norm(const NormFactory& norm, int64_t channels, Activation activation,
                const std::string& name = {});

  /// The layers of conv_norm().
  void add_conv_norm(int64_t in, int64_t out, const NormFactory& norm,
                     const ConvNormOptions& options = {});

  /// Registers a layer that its owner runs itself.
  template <class Layer>
  void add_name(const Layer& layer, const std::string& name = {}) {
    register_module(name.empty() ? std::to_string(layers_) : name, layer);
    ++layers_;
  }

  at::Tensor forward(const at::Tensor& x) const;

  /// The outputs of the steps with these numbers, in ascending order; later steps do not run.
  std::vector<at::Tensor> forward(const at::Tensor& x, std::initializer_list<size_t> kept) const;

 private:
  at::Tensor run(const Step& step, const at::Tensor& x) const;

  bool recompute_;
  size_t layers_ = 0;
  std::vector<Step> steps_;
};

/// A convolution that divides the resolution by the stride only, batch norm and activation.
std::shared_ptr<Chain> conv_norm(int64_t in, int64_t out, const NormFactory& norm,
                                 const ConvNormOptions& options = {});

/// `x` with this height and width.
at::Tensor scaled_to(const at::Tensor& x, at::IntArrayRef size);

/// Layers side by side on the same input. Their outputs are scaled to its height and width, and
/// concatenated.
class Branches : public torch::nn::Module {
 public:
  /// @param keeps_input the result begins with the input
  explicit Branches(bool keeps_input = false) : keeps_input_(keeps_input) {}

  /// @param name instead of the number
  void add(std::shared_ptr<Chain> branch, const std::string& name = {});
  int64_t size() const { return std::ssize(branches_); }
  at::Tensor forward(const at::Tensor& x) const;

 private:
  bool keeps_input_;
  std::vector<std::shared_ptr<Chain>> branches_;
};

/// Scales each channel by a factor between 0 and 1, computed from the means of all channels (Hu et
/// al., arXiv:1709.01507).
class SqueezeExcitation : public torch::nn::Module {
 public:
  /// @param channels of input and output
  /// @param squeezed channels between the two 1x1 convolutions
  SqueezeExcitation(int64_t channels, int64_t squeezed, Activation activation = Activation::kRelu,
                    Activation scale_activation = Activation::kSigmoid);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Conv2d fc1_;
  torch::nn::Conv2d fc2_;
  Activation activation_;
  Activation scale_activation_;
};

/// Layers with a shortcut around them if input and output have the same shape.
class Residual : public torch::nn::Module {
 public:
  /// @param name of `layers`
  /// @param drop_path probability that a sample takes only the shortcut in training
  Residual(const std::string& name, std::shared_ptr<Chain> layers, bool has_shortcut,
           double drop_path = 0);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::shared_ptr<Chain> layers_;
  bool has_shortcut_;
  double drop_path_;
};

/// Features, average pooling to a fixed size, and a classifier.
class FeatureNet : public Model {
 public:
  /// @param pooled side of the pooled features
  /// @param name of `features`
  FeatureNet(std::shared_ptr<Chain> features, int64_t pooled, std::shared_ptr<Chain> classifier,
             const std::string& name = "features");
  at::Tensor forward(at::Tensor x) override;

  const std::shared_ptr<Chain>& features() const { return features_; }

 private:
  std::shared_ptr<Chain> features_;
  int64_t pooled_;
  std::shared_ptr<Chain> classifier_;
};

/// Dropout and a linear layer.
std::shared_ptr<Chain> linear_classifier(int64_t in, int64_t classes, double dropout);

// ---- initial values ---------------------------------------------------------------------------

using Init = std::function<void(const at::Tensor& weight)>;

Init normal_init(double std);
/// Normal distribution with variance 2 / fan_out (He et al., arXiv:1502.01852).
Init kaiming_init();
/// Like Python's torch.nn.init.trunc_normal_, with bounds -2 and 2.
Init truncated_normal_init(double std);

/// Fills the weights of convolutions and linear layers, in the order of modules(), and zeroes their
/// biases. Layers without a function keep their weights and biases.
void init_layers(torch::nn::Module& model, const Init& convolution, const Init& linear);

// ---- options ----------------------------------------------------------------------------------

inline constexpr const char* kLastDropoutHelp =
    "probability that an input of the last layer is left out in training";

struct DropoutOptions {
  std::optional<double> dropout;

  static void describe(config::Schema<DropoutOptions>& schema);
};

struct DropPathOptions {
  std::optional<double> dropout;
  std::optional<double> stochastic_depth;

  static void describe(config::Schema<DropPathOptions>& schema);
};

}  // namespace syncbn::models

// DCGAN (Radford et al., arXiv:1511.06434): a generator of transposed convolutions and a
// discriminator of strided ones, each step of which doubles or halves the resolution. Names and
// initial values are those of PyTorch's example.

#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/tanh.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/models/gan.h>
#include <torch/nn/init.h>

#include <bit>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

constexpr int64_t kKernel = 4;
constexpr int64_t kSmallest = 4;  // side of the features next to the noise, and to the logit
constexpr double kLeak = 0.2;     // slope of the discriminator's activations below 0
constexpr double kStd = 0.02;     // of initial weights

struct DcganOptions {
  int64_t latent_size = 100;
  int64_t generator_width = 64;
  int64_t discriminator_width = 64;

  static void describe(config::Schema<DcganOptions>& schema) {
    constexpr int64_t kMax = 4096;
    schema.field("latent_size", &DcganOptions::latent_size, "values of noise that make an image")
        .between(1, kMax);
    schema
        .field("generator_width", &DcganOptions::generator_width,
               "channels of the generator's last features; each halving of the resolution doubles "
               "them")
        .between(1, kMax);
    schema
        .field("discriminator_width", &DcganOptions::discriminator_width,
               "channels of the discriminator's first features; each halving of the resolution "
               "doubles them")
        .between(1, kMax);
  }
};

struct Step {
  int64_t stride = 2;
  int64_t padding = 1;
};

/// The step between a single pixel and the smallest features.
constexpr Step kWhole = {.stride = 1, .padding = 0};

template <class Layer, class Options>
Layer square(int64_t in, int64_t out, Step step) {
  return Layer(Options(in, out, kKernel).stride(step.stride).padding(step.padding).bias(false));
}

torch::nn::ConvTranspose2d conv_up(int64_t in, int64_t out, Step step = {}) {
  return square<torch::nn::ConvTranspose2d, torch::nn::ConvTranspose2dOptions>(in, out, step);
}

torch::nn::Conv2d conv_down(int64_t in, int64_t out, Step step = {}) {
  return square<torch::nn::Conv2d, torch::nn::Conv2dOptions>(in, out, step);
}

/// @param doublings of the resolution from kSmallest to half of the images'
std::shared_ptr<Chain> generator(const DcganOptions& options, int64_t channels, int64_t doublings,
                                 const NormFactory& norm) {
  auto chain = std::make_shared<Chain>();
  int64_t width = options.generator_width << doublings;
  chain->add(conv_up(options.latent_size, width, kWhole));
  chain->add_norm(norm, width, Activation::kRelu);
  for (; width > options.generator_width; width /= 2) {
    chain->add(conv_up(width, width / 2));
    chain->add_norm(norm, width / 2, Activation::kRelu);
  }
  chain->add(conv_up(width, channels));
  chain->add_step([](const at::Tensor& x) { return at::tanh(x); });
  return chain;
}

std::shared_ptr<Chain> discriminator(const DcganOptions& options, int64_t channels,
                                     int64_t halvings, const NormFactory& norm) {
  const auto leaky_relu = [](const at::Tensor& x) { return at::leaky_relu(x, kLeak); };
  auto chain = std::make_shared<Chain>();
  int64_t width = options.discriminator_width;
  chain->add(conv_down(channels, width));
  chain->add_step(leaky_relu);
  for (; halvings > 0; --halvings, width *= 2) {
    chain->add(conv_down(width, 2 * width));
    chain->add_norm(norm, 2 * width, Activation::kNone);
    chain->add_step(leaky_relu);
  }
  chain->add(conv_down(width, 1, kWhole));
  return chain;
}

/// Convolutions: N(0, 0.02²). Batch norm: weights N(1, 0.02²), biases 0.
std::shared_ptr<Chain> initialized(std::shared_ptr<Chain> chain) {
  for (const auto& item : chain->named_parameters()) {
    const bool is_convolution = item.value().dim() > 1;
    if (!item.key().ends_with("weight")) continue;
    torch::nn::init::normal_(item.value(), is_convolution ? 0 : 1, kStd);
  }
  return chain;
}

/// A module with the network as its child `main`, as in PyTorch's example: `main.0.weight`.
std::shared_ptr<torch::nn::Module> named_main(const std::shared_ptr<Chain>& chain) {
  auto module = std::make_shared<torch::nn::Module>();
  module->register_module("main", chain);
  return module;
}

class Dcgan : public Gan {
 public:
  Dcgan(const DcganOptions& options, const ModelArgs& args, int64_t channels, int64_t doublings)
      : latent_size_(options.latent_size),
        image_shape_(args.sample_shape),
        generator_(initialized(generator(options, channels, doublings, NormFactory(args)))),
        discriminator_(
            initialized(discriminator(options, channels, doublings, NormFactory(args)))) {
    register_module(kGenerator, named_main(generator_));
    register_module(kDiscriminator, named_main(discriminator_));
  }

  int64_t latent_size() const override { return latent_size_; }
  std::vector<int64_t> image_shape() const override { return image_shape_; }

  at::Tensor generate(const at::Tensor& noise) override {
    return generator_->forward(noise.view({noise.size(0), latent_size_, 1, 1}));
  }

  at::Tensor discriminate(const at::Tensor& images) override {
    return discriminator_->forward(images).flatten();
  }

 private:
  int64_t latent_size_;
  std::vector<int64_t> image_shape_;
  std::shared_ptr<Chain> generator_;
  std::shared_ptr<Chain> discriminator_;
};

std::shared_ptr<Model> dcgan(const std::string& name, const ModelArgs& args,
                             const DcganOptions& options) {
  const int64_t channels = image_channels(name, args, 2 * kSmallest);
  refuse_recomputation(name, args);
  const int64_t height = args.sample_shape[1];
  const int64_t width = args.sample_shape[2];
  constexpr int64_t kLargest = 512;
  if (height != width || !std::has_single_bit(static_cast<uint64_t>(width)) || width > kLargest) {
    throw base::UserError(fmt::format(
        "model dcgan: images must be square, with a side of 8, 16, 32, ... {} pixels, got {} x {}; "
        "add a transform such as {{type: center_crop, size: 64}}",
        kLargest, width, height));
  }
  const int64_t doublings = std::bit_width(static_cast<uint64_t>(width / (2 * kSmallest))) - 1;
  return std::make_shared<Dcgan>(options, args, channels, doublings);
}

}  // namespace

void add_gans(ModelKind::Registry& registry) {
  add_model<DcganOptions>(registry, "dcgan", "DCGAN (Radford et al., arXiv:1511.06434)", dcgan);
}

}  // namespace syncbn::models

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/schema.h>
#include <syncbn/models/gan.h>

#include <algorithm>
#include <utility>

#include "records/pictures.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct GanOptions {
  double label_smoothing = 0;
  int64_t samples = 64;

  static void describe(config::Schema<GanOptions>& schema) {
    schema
        .field("label_smoothing", &GanOptions::label_smoothing,
               "the discriminator's target for real images is 1 less this (Salimans et al., "
               "arXiv:1606.03498)")
        .fraction();
    describe_samples(schema, "generated images");
  }
};

/// [N, size] of a standard normal distribution, of the type and on the device of `like`. Does not
/// wait for the device.
at::Tensor draw_noise(std::vector<data::SampleRandom> randoms, int64_t size,
                      const at::Tensor& like) {
  at::Tensor noise = at::empty({std::ssize(randoms), size},
                               at::TensorOptions(at::kFloat).pinned_memory(like.is_cuda()));
  auto* next = noise.mutable_data_ptr<float>();
  for (data::SampleRandom& random : randoms) {
    for (int64_t i = 0; i < size; ++i) *next++ = static_cast<float>(random.normal());
  }
  return noise.to(like.options(), /*non_blocking=*/true);
}

/// The mean loss of logits against one target for all.
at::Tensor mean_loss(const at::Tensor& logits, double target) {
  return at::binary_cross_entropy_with_logits(logits, at::full_like(logits, target));
}

/// Two turns a step: the discriminator learns to tell real images from generated ones, and the
/// generator learns to make images that the discriminator takes for real (with the non-saturating
/// loss of Goodfellow et al., arXiv:1406.2661, section 3). The noise depends on seed, epoch and
/// sample, not on ranks. Each turn generates its images anew, from the same noise.
class GanTask : public Task {
 public:
  GanTask(const GanOptions& options, std::vector<int64_t> shape)
      : options_(options), shape_(std::move(shape)) {}

  void attach(models::Model& model) override {
    gan_ = dynamic_cast<models::Gan*>(&model);
    if (gan_ == nullptr) {
      throw base::UserError("it generates no images, as task gan needs it; set model to dcgan");
    }
    if (gan_->image_shape() == shape_) return;
    throw base::UserError(fmt::format(
        "it generates images {}, as the training data has, and those to evaluate on are "
        "{} (channels, height, width); give transforms and test_transforms one size",
        c10::str(at::IntArrayRef(gan_->image_shape())), c10::str(at::IntArrayRef(shape_))));
  }

  std::vector<std::string> turns() const override {
    return {models::Gan::kDiscriminator, models::Gan::kGenerator};
  }

  /// {logits of the real images, logits of generated ones} in the discriminator's turn, {logits of
  /// generated ones} in the generator's, from the same noise.
  Outputs forward(models::Model& /*model*/, size_t turn, const data::Batch& batch) const override {
    const at::Tensor noise =
        draw_noise(batch.randoms, gan_->latent_size(), gan_->parameters().front());
    if (turn == kGenerator) return {gan_->discriminate(gan_->generate(noise))};
    at::Tensor generated;
    {
      const at::NoGradGuard no_grad;
      generated = gan_->generate(noise);
    }
    return {gan_->discriminate(batch.data), gan_->discriminate(generated)};
  }

  at::Tensor loss(const Outputs& outputs, const at::Tensor& /*target*/) const override {
    if (outputs.size() == 1) return mean_loss(outputs.front(), 1);
    return mean_loss(outputs[0], 1 - options_.label_smoothing) + mean_loss(outputs[1], 0);
  }

  /// The discriminator's loss.
  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& /*target*/) const override {
    const auto samples = static_cast<double>(outputs.front().size(0));
    const at::Tensor mean = mean_loss(outputs[0], 1) + mean_loss(outputs[1], 0);
    return at::stack({mean * samples, at::full_like(mean, samples)});
  }

  int64_t num_counts() const override { return 3; }

  /// Number of images, of real ones taken for real, and of generated ones not taken for real.
  at::Tensor counts(const Outputs& outputs, const at::Tensor& /*target*/) const override {
    const auto sum = [](const at::Tensor& is_right) { return is_right.sum(at::kLong); };
    const at::Tensor real = sum(outputs[0] > 0);
    return at::stack({at::full_like(real, outputs[0].size(0)), real, sum(outputs[1] <= 0)});
  }

  std::vector<Metric> metrics(std::span<const int64_t> counts,
                              std::span<const int64_t> /*records*/) const override {
    const int64_t images = std::max<int64_t>(counts[0], 1);  // without any, none is right
    return {{.name = "real_accuracy", .value = share_of(counts[1], images), .is_share = true},
            {.name = "fake_accuracy", .value = share_of(counts[2], images), .is_share = true}};
  }

  /// A discriminator that is easily fooled and a poor generator each make the other look good.
  bool has_best() const override { return false; }

  /// "samples": images from the same noise each time.
  std::vector<Picture> pictures(std::span<const Seen> /*seen*/,
                                const data::Normalization& normalization) const override {
    if (options_.samples == 0) return {};
    std::vector<data::SampleRandom> randoms;
    for (int64_t i = 0; i < options_.samples; ++i) randoms.emplace_back(0, 0, i);
    const at::NoGradGuard no_grad;
    const at::Tensor noise =
        draw_noise(std::move(randoms), gan_->latent_size(), gan_->parameters().front());
    const at::Tensor images = pixels_of(gan_->generate(noise), normalization);
    int64_t columns = 1;
    while (columns * columns < options_.samples) ++columns;
    return {{.name = "samples", .image = tiled(images.unbind(), columns)}};
  }

 private:
  static constexpr size_t kGenerator = 1;  // its turn

  GanOptions options_;
  std::vector<int64_t> shape_;  ///< of the data's images
  models::Gan* gan_ = nullptr;
};

std::unique_ptr<Task> make_gan(const GanOptions& options, const data::Dataset& dataset) {
  return std::make_unique<GanTask>(options, dataset.sample_shape());
}

}  // namespace

void add_gan(TaskKind::Registry& registry) {
  registry.add<GanOptions>(
      "gan", "images like those of the data, by a generator and a discriminator", make_gan);
}

}  // namespace syncbn::train

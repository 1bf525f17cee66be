#pragma once

#include <cstdint>
#include <vector>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A generative adversarial network (Goodfellow et al., arXiv:1406.2661): two networks in one
/// module. The names of their parameters begin with "generator." and "discriminator.".
class Gan : public Model {
 public:
  static constexpr const char* kGenerator = "generator";
  static constexpr const char* kDiscriminator = "discriminator";

  /// The number of noise values for an image.
  virtual int64_t latent_size() const = 0;

  /// [C, H, W]
  virtual std::vector<int64_t> image_shape() const = 0;

  /// @param noise [N, latent_size()], from a standard normal distribution
  /// @return images [N, C, H, W], with values between -1 and 1
  virtual at::Tensor generate(const at::Tensor& noise) = 0;

  /// @param images [N, C, H, W]
  /// @return [N] logits of the images being real
  virtual at::Tensor discriminate(const at::Tensor& images) = 0;

  /// discriminate()
  at::Tensor forward(at::Tensor images) override { return discriminate(images); }
};

}  // namespace syncbn::models

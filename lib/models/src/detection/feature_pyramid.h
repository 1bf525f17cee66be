#pragma once

#include <string>
#include <vector>

#include "../backbones.h"
#include "../blocks.h"

namespace syncbn::models {

/// A feature pyramid (Lin et al., arXiv:1612.03144) on the last three stages of a ResNet, with
/// two coarser levels (Lin et al., arXiv:1708.02002): P3 to P7, at 1/8 to 1/128 of the images'
/// resolution.
class ResNetFpn : public torch::nn::Module {
 public:
  static constexpr int64_t kChannels = 256;  ///< of each level

  /// @param name of the whole network, for messages
  /// @param p6_from_c5 compute P6 from the last stage instead of P5
  ResNetFpn(const std::string& name, const ModelArgs& args, const ResNetStages& stages,
            bool p6_from_c5);

  /// @param images [N, C, H, W]
  /// @return P3 to P7
  std::vector<at::Tensor> forward(const at::Tensor& images);

 private:
  Backbone body_;
  bool p6_from_c5_;
  std::vector<std::shared_ptr<Chain>> lateral_;  ///< of C3 to C5
  std::vector<std::shared_ptr<Chain>> smooth_;   ///< of P3 to P5
  torch::nn::Conv2d p6_{nullptr};
  torch::nn::Conv2d p7_{nullptr};
};

}  // namespace syncbn::models

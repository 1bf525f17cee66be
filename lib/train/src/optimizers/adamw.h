#pragma once

#include <memory>
#include <vector>

#include <syncbn/train/optimizer.h>

namespace syncbn::train {

struct AdamwOptions {
  double lr = 1e-3;
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool fused = true;

  static void describe(config::Schema<AdamwOptions>& schema);
};

/// torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).
std::unique_ptr<Optimizer> make_adamw(const AdamwOptions& options, const NamedTensors& parameters);

}  // namespace syncbn::train

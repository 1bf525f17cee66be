#pragma once

#include <memory>

#include <syncbn/train/optimizer.h>

namespace syncbn::train {

struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool fused = true;

  static void describe(config::Schema<SgdOptions>& schema);
};

/// torch.optim.SGD, without dampening: v = momentum * v + g; p -= lr * v.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options, const NamedTensors& parameters);

}  // namespace syncbn::train

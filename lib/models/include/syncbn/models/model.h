#pragma once

#include <cstdint>
#include <memory>
#include <vector>

// torch::nn::Module: parameters, buffers and their names.
#include <torch/nn/module.h>

#include <syncbn/config/schema.h>
#include <syncbn/dist/process_group_ptr.h>
#include <syncbn/models/model_kind.h>

namespace syncbn::models {

/// A network from a batch to its outputs: what DistributedDataParallel<Model> wraps.
class Model : public torch::nn::Module {
 public:
  /// @param input [N, C, H, W], float32. @return logits [N, num_classes].
  virtual at::Tensor forward(at::Tensor input) = 0;
};

/// Whose batch the normalisation layers take their statistics from while training.
enum class Norm {
  kLocal,  ///< this rank's: torch::nn::BatchNorm2d
  kSync,   ///< that of all ranks: dist::SyncBatchNorm
};

/// What a model is made from besides its own options.
struct ModelArgs {
  int64_t num_classes = 1000;
  /// {channels, height, width} of a sample.
  std::vector<int64_t> sample_shape = {3, 224, 224};
  Norm norm = Norm::kLocal;
  /// The ranks that share statistics, for Norm::kSync; empty: all of them.
  dist::ProcessGroupPtr norm_group = {};
};

}  // namespace syncbn::models

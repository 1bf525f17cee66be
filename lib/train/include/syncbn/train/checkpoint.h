#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/data/sampler.h>
#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// Everything that a run needs to resume exactly. Its file is a dictionary that Python reads with
/// torch.load(path, weights_only=True); `checkpoint["model"]` is a state dict.
struct Checkpoint {
  static constexpr int64_t kFormatVersion = 1;

  std::map<std::string, at::Tensor> model;  ///< parameters and buffers
  OptimizerState optimizer;
  int64_t step = 0;  ///< steps so far, over all epochs
  data::SamplerState sampler;
  double epoch_loss = 0;  ///< sum over the samples of all ranks in this epoch so far
  int64_t epoch_samples = 0;
  int64_t world_size = 1;
  std::vector<at::Tensor> rng_states;  ///< one per rank, uint8
  double best_accuracy = -1;           ///< negative: not evaluated yet
  int64_t best_epoch = 0;
  double seconds = 0;      ///< training time so far
  std::string epoch_line;  ///< log.jsonl's for the last complete epoch; empty in older checkpoints
  std::string config;      ///< resolved, in YAML
};

/// The bytes of a checkpoint file.
std::string serialize(const Checkpoint& checkpoint);

/// @param name of the file, for messages
/// @throws base::UserError for damaged bytes, those of another program, and other format versions.
Checkpoint parse_checkpoint(const std::string& bytes, const std::string& name);

}  // namespace syncbn::train

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// at::Tensor: what a checkpoint mostly consists of.
#include <ATen/core/Tensor.h>

#include <syncbn/data/sampler.h>
#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// Everything that a run needs to go on as if it had never stopped.
///
/// In a file it is a dictionary that Python reads with torch.load(path, weights_only=True);
/// `checkpoint["model"]` is a state dict for load_state_dict().
struct Checkpoint {
  static constexpr int64_t kFormatVersion = 1;

  std::map<std::string, at::Tensor> model;  ///< parameters and buffers
  OptimizerState optimizer;
  int64_t step = 0;  ///< steps done over all epochs
  data::SamplerState sampler;
  double epoch_loss = 0;  ///< sum of losses over epoch_samples, by all ranks, in this epoch
  int64_t epoch_samples = 0;
  int64_t world_size = 1;
  std::vector<at::Tensor> rng_states;  ///< of every rank, uint8
  double best_accuracy = -1;           ///< below 0: not evaluated yet
  int64_t best_epoch = 0;
  double seconds = 0;      ///< trained so far
  std::string epoch_line;  ///< of log.jsonl, about the last whole epoch; empty in older checkpoints
  std::string config;      ///< resolved, as YAML
};

/// The bytes of a checkpoint file.
std::string serialize(const Checkpoint& checkpoint);

/// @param name of the file, for messages.
/// @throws base::UserError when the bytes are damaged, cut off, of another program or of a newer
///   version.
Checkpoint parse_checkpoint(const std::string& bytes, const std::string& name);

}  // namespace syncbn::train

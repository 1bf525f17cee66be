#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <syncbn/data/sampler.h>
#include <syncbn/models/model.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// Whether a file is a checkpoint of torchvision's references/classification/train.py or of
/// imagenet/main.py of pytorch/examples, which save at the end of an epoch.
/// @throws what read_torch_values() throws
bool is_python_run(const std::filesystem::path& path);

/// The run that continues from a checkpoint of Python's.
struct PythonRunTarget {
  models::Model& model;
  const Optimizer& optimizer;
  const std::string& config;  ///< in YAML, resolved
  data::SamplerState start;   ///< its first position
  int64_t steps_per_epoch = 1;
  int64_t world_size = 1;
};

/// Converts a checkpoint of one of the scripts, and loads its weights into the model. `config` of
/// the result is the target's, with the file's hyperparameters where they differ.
/// @throws base::UserError if the file does not fit the model or the optimizer's groups, or is
///   damaged; its message calls the file "it"
Checkpoint read_python_run(const std::filesystem::path& path, const PythonRunTarget& target);

}  // namespace syncbn::train

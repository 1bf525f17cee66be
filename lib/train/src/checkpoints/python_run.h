#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/data/sampler.h>
#include <syncbn/models/model.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>
#include <syncbn/train/optimizer.h>

namespace syncbn::train {

/// Python scripts whose checkpoints `train` resumes from and writes. They save at the end of an
/// epoch.
enum class PythonScript {
  kTorchvision,  ///< references/classification/train.py
  kImagenet,     ///< imagenet/main.py of pytorch/examples
};

/// Options of torch.optim's optimizers that have the same names and meanings here, besides lr and
/// weight_decay; empty for an optimizer that torch.optim lacks.
std::vector<std::string> python_options(const std::string& optimizer_type);

/// Whether a file is a checkpoint of one of these scripts.
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

/// A checkpoint for the script's --resume.
/// @param config the run's
/// @param model of the checkpoint; gets its weights
/// @throws base::UserError for a checkpoint in the middle of an epoch, and for optimizers and
///   schedules that the script lacks; its message calls the checkpoint "it"
models::Dict to_python_run(const Checkpoint& checkpoint, PythonScript script, const Config& config,
                           models::Model& model);

}  // namespace syncbn::train

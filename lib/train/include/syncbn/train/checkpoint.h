#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <syncbn/base/error.h>
#include <syncbn/data/sampler.h>
#include <syncbn/train/optimizer.h>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace syncbn::train {

/// Values that a program stores in its checkpoint: tensors, numbers, text.
using Extra = std::map<std::string, c10::IValue>;

/// Saves a module and its optimizer, for programs that have their own training loop. Writes beside
/// `path`, syncs and renames, so a reader sees either the old file or the new one. Python's
/// torch.load(path, weights_only=True) returns a dictionary: "model" is a state dict, "extra" holds
/// `extra`, and "optimizer" is a tensor of the bytes that torch::save() writes. Call it on one
/// rank.
/// @throws base::UserError or base::UnavailableError naming the file
void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer* optimizer = nullptr, const Extra& extra = {});

/// Loads a file of save_checkpoint() into a module and an optimizer of the same kind over its
/// parameters, or the network of a run of `train` (best.pt, last.pt) into a module. Copies the
/// values into the module's tensors, on their devices. Each rank may call it.
/// @return `extra`; empty for a run of `train`
/// @throws base::UserError for a file that is missing, damaged or another program's, and for a
///   module with other names or shapes
Extra load_checkpoint(const std::string& path, torch::nn::Module& module,
                      torch::optim::Optimizer* optimizer = nullptr);

/// Everything that a run needs to resume exactly. Its file is a dictionary that Python reads with
/// torch.load(path, weights_only=True); `checkpoint["model"]` is a state dict.
struct Checkpoint {
  static constexpr const char* kFormat = "syncbn-checkpoint";
  static constexpr int64_t kFormatVersion = 1;

  using Tensors = std::map<std::string, at::Tensor>;

  /// A checkpoint that is kept for its result.
  struct Best {
    double value = 0;                 ///< of Checkpoint::best_metric
    std::optional<double> loss = {};  ///< of the same evaluation; empty in older checkpoints
    int64_t epoch = 0;
    int64_t step = 0;
    std::string file = {};  ///< in the run's folder: "best.pt"
  };

  Tensors model;              ///< parameters and buffers
  Tensors ema;                ///< their moving averages; empty: the run has none
  bool has_optimizer = true;  ///< false in best.pt, from which no run resumes
  OptimizerState optimizer;
  Tensors scaler;                          ///< empty: the run has none
  std::map<std::string, double> schedule;  ///< empty: the schedule has no state
  double lr_scale = 1;                     ///< factor of the learning rate; falls at each restore
  int64_t restores = 0;
  int64_t step = 0;  ///< steps so far, over all epochs
  data::SamplerState sampler;
  double epoch_loss = 0;  ///< sum over the samples of all ranks in this epoch so far
  int64_t epoch_samples = 0;
  std::vector<int64_t> epoch_counts;  ///< Task::counts() of these samples; empty: none
  int64_t world_size = 1;
  std::vector<at::Tensor> rng_states;  ///< one per rank, uint8
  /// Each rank's buffers of the model, concatenated, float64; empty: all ranks have those in
  /// `model`.
  std::vector<at::Tensor> rank_buffers;
  std::string best_metric;            ///< the metric by which `best` is sorted
  std::vector<Best> best;             ///< best first; empty: not evaluated yet
  std::optional<double> improved_to;  ///< the last result that early_stop counted as better
  int64_t stale_evaluations = 0;      ///< evaluations after that one
  double seconds = 0;                 ///< training time so far
  std::string epoch_line;  ///< log.jsonl's line on the last whole epoch; empty in older checkpoints
  std::string config;      ///< resolved, in YAML
  std::vector<std::string> classes;  ///< their names in the order of the logits; empty: unknown
  /// A detector's ids of the classes in annotation files, in the order of the logits; empty:
  /// unknown.
  std::vector<int64_t> category_ids;
};

/// The bytes of a checkpoint file.
std::string serialize(const Checkpoint& checkpoint);

/// Writes the bytes of serialize() tensor by tensor, without holding all of them in memory.
/// @throws what base::write_file_atomically() throws
void write_checkpoint(const Checkpoint& checkpoint, const std::filesystem::path& path);

/// A copy with its own tensors on the CPU, to be written while training goes on.
Checkpoint copy_to_host(const Checkpoint& checkpoint);

/// A checkpoint that a newer version of train wrote.
class NewerCheckpointError : public base::UserError {
 public:
  using base::UserError::UserError;
};

/// @param name of the file, for messages
/// @throws base::UserError for damaged bytes, those of another program, and names in `best` that no
///   run gives its files; NewerCheckpointError for another format version
Checkpoint parse_checkpoint(const std::string& bytes, const std::string& name);

}  // namespace syncbn::train

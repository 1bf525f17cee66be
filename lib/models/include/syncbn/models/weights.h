#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::nn {
class Module;
}

namespace syncbn::models {

/// Tensors by the names of parameters and buffers, in the order of the network.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// Reads weights that Python or this project has saved:
/// - torch.save's files, in the zip format and in the one before torch 1.6 (.pth, .pt, .bin)
/// - safetensors
/// - the folder of a run of `train`: its best.pt, or last.pt if there is none.
///
/// The weights are the file's whole dictionary, or that of its key `state_dict`, `model` or
/// `model_ema`, the first that is there. The prefixes `module.` and `_orig_mod.`, which
/// DistributedDataParallel and torch.compile put ahead of all names, are removed.
///
/// Nothing in a file is executed: a pickle with anything but tensors, numbers, text and containers
/// is refused. Tensors share the file's pages, which are read at their first use; they may be
/// written to, without changing the file. The file must not be cut off while they live.
/// @param key takes the dictionary of this key, as "model_ema"
/// @throws base::UserError naming the file and what is wrong with it; base::UnavailableError when
///   the disk fails. Thread-safe.
StateDict read_state_dict(const std::string& path, const std::string& key = "");

/// The file that read_state_dict() reads: of a run's folder its best.pt or last.pt, else `path`.
/// @throws base::UserError for a folder without either
std::string weights_file(const std::string& path);

struct LoadOptions {
  /// Wildcards on the module's names (base::matches_name()), such as "fc": these keep their values.
  std::vector<std::string> skip = {};
  /// Every name must be in both; else those that are in one only are left out.
  bool strict = true;
  /// Name of the child that takes the weights, as "backbone.body"; names are then relative to it,
  /// and weights that it lacks, such as those of a classifier, are left out. Empty: the module
  /// itself.
  std::string into = {};
};

/// Names, in their order.
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> skipped;     ///< of the module, by LoadOptions::skip
  std::vector<std::string> missing;     ///< of the module, and not among the weights
  std::vector<std::string> unexpected;  ///< of the weights, and not of the module
};

/// Copies weights into a module's parameters and buffers of the same names (a Model's also by
/// present_name()), converting types. As in Python, a batch norm's num_batches_tracked may be
/// missing.
/// @throws base::UserError with all names that are missing, unexpected (`strict`) or of another
///   shape, for a wildcard that no name matches, and for a child that is not there; the module is
///   unchanged then.
LoadReport load_state_dict(torch::nn::Module& module, const StateDict& weights,
                           const LoadOptions& options = {});

/// A module's parameters and buffers, in the order of Python's state_dict(): each module's own
/// parameters and buffers, then its children's. They share the module's memory.
StateDict state_dict(const torch::nn::Module& module);

/// Writes state_dict(): for .safetensors in that format, for .pth, .pt and .bin in torch.save's.
/// Replaces the file at once when it is whole.
/// @throws base::UserError for another extension, and as base::write_file_atomically().
void write_state_dict(const std::string& path, const torch::nn::Module& module);

}  // namespace syncbn::models

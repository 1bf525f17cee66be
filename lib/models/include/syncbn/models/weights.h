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

/// Reads weights saved by Python or this project:
/// - torch.save's files, in the zip format or the format before torch 1.6 (.pth, .pt, .bin)
/// - safetensors
/// - the folder of a run of `train`: its best.pt, or last.pt if there is none.
///
/// The weights are the dictionary at the first of the keys `state_dict`, `model` and `model_ema`
/// that has tensors, or else the file's whole dictionary. Removes the prefixes `module.` and
/// `_orig_mod.`, which DistributedDataParallel and torch.compile put in front of all names.
///
/// Executes nothing in a file: a pickle with anything but tensors, numbers, text and containers is
/// refused. Tensors share the file's pages, which the system reads at first use; writing to a
/// tensor does not change the file. The file must not be truncated while they live. Thread-safe.
/// @param key read the dictionary at this key instead, such as "model_ema"
/// @throws base::UserError naming the file and what is wrong with it; base::UnavailableError if the
///   disk fails.
StateDict read_state_dict(const std::string& path, const std::string& key = "");

/// The file that read_state_dict() reads: best.pt or last.pt in a run's folder, otherwise `path`.
/// @throws base::UserError for a folder without either
std::string weights_file(const std::string& path);

struct LoadOptions {
  /// Wildcards (base::matches_name()) for names in the module, such as "fc", that keep their
  /// values.
  std::vector<std::string> skip = {};
  /// Whether every name must be in both; otherwise names in only one of them are left out.
  bool strict = true;
  /// Name of the child that receives the weights, such as "backbone.body"; names are then relative
  /// to it, and weights that it lacks, such as a classifier's, are left out. Empty: the module
  /// itself.
  std::string into = {};
};

/// Names, in the order of the module or of the weights.
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> skipped;     ///< in the module, matched by LoadOptions::skip
  std::vector<std::string> missing;     ///< in the module, not in the weights
  std::vector<std::string> unexpected;  ///< in the weights, not in the module
};

/// Copies weights into a module's parameters and buffers of the same names (a Model's also by
/// present_name()), converting types. As in Python, a batch norm's num_batches_tracked may be
/// missing.
/// @throws base::UserError listing names (at most 10 of each kind) that are missing, unexpected
///   (`strict`) or of another shape; for a wildcard that no name matches; and for an unknown child.
///   The module is then unchanged.
LoadReport load_state_dict(torch::nn::Module& module, const StateDict& weights,
                           const LoadOptions& options = {});

/// A module's parameters and buffers, in the order of Python's state_dict(): each module's own
/// parameters and buffers, then its children's. They share the module's memory.
StateDict state_dict(const torch::nn::Module& module);

/// Writes state_dict() atomically: a .safetensors file in that format, a .pth, .pt or .bin file in
/// torch.save's.
/// @throws base::UserError for another extension, and like base::write_file_atomically().
void write_state_dict(const std::string& path, const torch::nn::Module& module);

}  // namespace syncbn::models

#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::nn {
class Module;
}

namespace syncbn::models {

/// Tensors by the names of parameters and buffers, in the order of the network.
struct StateDict : torch::OrderedDict<std::string, at::Tensor> {
  /// What a file holds besides and is not read, such as quantized tensors: types by name.
  std::map<std::string, std::string> unread = {};
};

/// Reads weights saved by Python or this project:
/// - torch.save's files, in the zip format or the format before torch 1.6 (.pth, .pt, .bin)
/// - safetensors
/// - the folder of a run of `train`: its best.pt, or last.pt if there is none.
///
/// The weights are the dictionary at the first of the keys `state_dict`, `model` and `model_ema`
/// that has tensors, or else the file's whole dictionary, or else the only one in it with tensors.
///
/// Executes nothing in a file: objects other than tensors, numbers, text and containers are not
/// read. Tensors share the file's pages, which the system reads at first use; writing to a
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
  /// values. Names in the weights that match are left out as well.
  std::vector<std::string> skip = {};
  /// Whether every name must be in both; otherwise names in only one of them are left out.
  bool strict = true;
  /// Name of the child that receives the weights, such as "backbone.body"; names are then relative
  /// to it, and weights that it lacks, such as a classifier's, are left out. Empty: the module
  /// itself.
  std::string into = {};
  /// Wildcards for names in the weights that are left out.
  std::vector<std::string> ignore = {};
  /// Part of the names in the weights that comes before the network's, such as "encoder_q"; names
  /// without it are left out. Empty: found by the names.
  std::string prefix = {};
  /// Beginning of the configuration keys that set these options, such as "init_", for advice in
  /// messages. Empty: no advice.
  std::string keys = {};
};

/// Names, in the order of the module or of the weights.
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> skipped;     ///< in the module, matched by LoadOptions::skip
  std::vector<std::string> missing;     ///< in the module, not in the weights
  std::vector<std::string> unexpected;  ///< in the weights, not in the module, or left out
  std::string prefix;                   ///< of the loaded names in the weights, such as "model."
};

/// Copies weights into a module's parameters and buffers of the same names (a Model's also by
/// present_name()), converting types. As in Python, a batch norm's num_batches_tracked may be
/// missing. Ignores the parts of all names, wildcards and prefixes that wrappers insert, such as
/// `module.` (DistributedDataParallel) and `_orig_mod.` (torch.compile), unless two names in the
/// module differ in nothing else; messages and the report leave them out. The prefix after which
/// most tensors fit is removed, if these are at least half of the network's.
/// @throws base::UserError listing names (at most 10 of each kind) that are missing, unexpected
///   (`strict`), of another shape, complex for a real one, or unread; for prefixes that fit alike;
///   for a wildcard that no name matches; for two names in the weights that differ in wrappers
///   only; and for an unknown child. The module is then unchanged.
LoadReport load_state_dict(torch::nn::Module& module, const StateDict& weights,
                           LoadOptions options = {});

/// A module's parameters and buffers, in the order of Python's state_dict(): each module's own
/// parameters and buffers, then its children's. They share the module's memory.
StateDict state_dict(const torch::nn::Module& module);

/// Writes state_dict() atomically: a .safetensors file in that format, a .pth, .pt or .bin file in
/// torch.save's.
/// @throws base::UserError for another extension, and like base::write_file_atomically().
void write_state_dict(const std::string& path, const torch::nn::Module& module);

}  // namespace syncbn::models

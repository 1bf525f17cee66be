#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// Files in which a trained network leaves this project.
enum class ExportFormat {
  kTorch,        ///< a dictionary for torch.load(); its "model" is a state dict
  kSafetensors,  ///< Hugging Face's format: tensors by name
  kTorchScript,  ///< the network with its weights, for torch.jit.load()
  kOnnx,         ///< the same for other runtimes: opset 18, float32
};

/// What a program that runs an exported network must know. Each format keeps it under the names of
/// the members: beside "model" in a dictionary of torch, as JSON in the strings of safetensors'
/// __metadata__ and of ONNX's metadata_props, and in TorchScript's extra file "info.json".
struct ExportInfo {
  std::vector<std::string> classes;  ///< in the order of the logits; empty: unknown
  std::vector<double> mean;          ///< one value per channel, of pixels in [0, 1]
  std::vector<double> std;           ///< the same
  std::vector<int64_t> size;         ///< of the input: {channels, height, width}
  /// JSON: what is done to an image ahead of the normalisation; empty: unknown.
  std::string transforms;
};

/// The formats' names, in the order of ExportFormat: "torch", "safetensors", "torchscript", "onnx".
const std::vector<std::string>& export_formats();

/// The ending of a format's files: ".pt".
std::string extension(ExportFormat format);

/// Writes a network to a file, which is replaced at once when it is whole. The network must be on
/// the CPU, and have been made with Norm::kLocal; it is in evaluation mode afterwards.
///
/// TorchScript and ONNX are traces of forward_all() on images of `info.size`: they take any number
/// of such images. ONNX's input is `images`; its output is `logits`, or `output_0` and so on.
/// @throws base::UserError for a network that cannot be traced, an operator without a counterpart
///   in ONNX, and as base::write_file_atomically()
void export_model(const std::string& path, ExportFormat format, Model& model,
                  const ExportInfo& info);

}  // namespace syncbn::models

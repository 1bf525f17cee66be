#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// File formats for exported networks.
enum class ExportFormat {
  kTorch,        ///< a dictionary for torch.load(); its "model" is a state dict
  kSafetensors,  ///< Hugging Face's format: tensors by name
  kTorchScript,  ///< the network with its weights, for torch.jit.load()
  kOnnx,         ///< the same for other runtimes: opset 18, float32
};

/// What a program needs to know to run an exported network. Each format stores it under the names
/// of the members: torch next to "model" in the dictionary, safetensors (__metadata__) and ONNX
/// (metadata_props) as strings of JSON, TorchScript in the extra file "info.json".
struct ExportInfo {
  std::vector<std::string> classes;  ///< in the order of the logits; empty: unknown
  std::vector<double> mean;          ///< one value per channel, of pixels in [0, 1]
  std::vector<double> std;           ///< the same
  std::vector<int64_t> size;         ///< of the input: {channels, height, width}
  /// JSON: the transforms of an image before the normalisation; empty: unknown.
  std::string transforms;
};

/// The formats' names, in the order of ExportFormat: "torch", "safetensors", "torchscript", "onnx".
const std::vector<std::string>& export_formats();

/// The extension of a format's files: ".pt".
std::string extension(ExportFormat format);

/// Writes a network to a file, atomically. The network must be on the CPU and made with
/// Norm::kLocal; this puts it into evaluation mode.
///
/// TorchScript and ONNX are traces of forward_all() on images of `info.size`: they take any number
/// of such images. ONNX's input is `images`; its output is `logits`, or `output_0` and so on.
/// @throws base::UserError for a network that cannot be traced, an operator without a counterpart
///   in ONNX, and like base::write_file_atomically()
void export_model(const std::string& path, ExportFormat format, Model& model,
                  const ExportInfo& info);

}  // namespace syncbn::models

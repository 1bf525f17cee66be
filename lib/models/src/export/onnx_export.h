#pragma once

#include <map>
#include <string>

#include <torch/csrc/jit/api/module.h>

namespace syncbn::models::detail {

/// The network as an ONNX file. Runs forward() on an example, node by node, and records each
/// operator call whose inputs depend on the images. Everything else, including shapes and branches,
/// becomes constant.
/// @param module in evaluation mode
/// @param example [N, C, H, W], N > 1; only the number of images stays variable
/// @param metadata for metadata_props
/// @throws base::UserError naming an operator that has no counterpart, and the layer before it
std::string onnx_bytes(const torch::jit::Module& module, const at::Tensor& example,
                       const std::map<std::string, std::string>& metadata);

}  // namespace syncbn::models::detail

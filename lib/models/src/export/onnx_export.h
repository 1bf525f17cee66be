#pragma once

#include <map>
#include <string>

#include <torch/csrc/jit/api/module.h>

namespace syncbn::models::detail {

/// The network as an ONNX file. Runs forward() on an example, node by node, and adds each call of
/// an operator on what depends on the images; all else, shapes and branches included, becomes
/// constant.
/// @param module in evaluation mode
/// @param example [N, C, H, W], N > 1; only the number of images stays free
/// @param metadata for metadata_props
/// @throws base::UserError naming an operator that has no counterpart, and what is ahead of it
std::string onnx_bytes(const torch::jit::Module& module, const at::Tensor& example,
                       const std::map<std::string, std::string>& metadata);

}  // namespace syncbn::models::detail

#pragma once

#include <torch/csrc/jit/api/module.h>

#include <syncbn/models/model.h>

namespace syncbn::models::detail {

/// The network as a TorchScript module with the same names of parameters, buffers and submodules,
/// which shares their memory. Its forward() computes what the network does in evaluation mode, for
/// any number of images like `example`: the logits, or a tuple if there are several outputs.
/// Returns a network that is already TorchScript unchanged.
/// @param example [N, C, H, W], N > 1
/// @throws base::UserError if the trace gives other results for other images
torch::jit::Module traced_module(Model& model, const at::Tensor& example);

}  // namespace syncbn::models::detail

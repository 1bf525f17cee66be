#pragma once

#include <torch/csrc/jit/api/module.h>

#include <syncbn/models/model.h>

namespace syncbn::models::detail {

/// The network as a TorchScript module with the same names of parameters, buffers and submodules,
/// which shares their memory. Its forward() has what the network computes in evaluation mode for
/// images like `example`, for any number of them: the logits, or a tuple if there are several
/// outputs. A network that is TorchScript already stays as it is.
/// @param example [N, C, H, W], N > 1
/// @throws base::UserError if the trace gives other results for other images
torch::jit::Module traced_module(Model& model, const at::Tensor& example);

}  // namespace syncbn::models::detail

#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace syncbn::dist::detail {

/// Whether the graph of any output contains one of these leaves.
bool reach_any(const std::vector<at::Tensor>& outputs,
               const std::vector<const torch::autograd::Node*>& leaves);

/// Copies of all outputs that share one autograd node. If the loss uses only some of them, backward
/// still runs the graphs of the others, with undefined gradients, so that the reducer does not wait
/// for their parameters. Backward calls `on_backward` when it reaches the node.
/// @param anchor a leaf that backward must reach, with an undefined gradient: if no output requires
///   a gradient, the copies do. May be undefined.
std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs, const at::Tensor& anchor,
                                     std::function<void()> on_backward);

}  // namespace syncbn::dist::detail

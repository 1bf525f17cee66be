#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace syncbn::dist::detail {

/// Whether the graph of any output comes to one of these nodes, which have none behind them.
bool reach_any(const std::vector<at::Tensor>& outputs,
               const std::vector<const torch::autograd::Node*>& leaves);

/// A copy of all outputs at once, with one node behind them. When the loss uses only some of them,
/// the others' graphs still run, with undefined gradients: their parameters count as ready instead
/// of being waited for. `on_backward` is called when backward comes to this point.
/// @param anchor a leaf that backward shall reach in any case, with an undefined gradient; then
///   outputs of which none requires a gradient do so afterwards. May be undefined: no anchor.
std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs, const at::Tensor& anchor,
                                     std::function<void()> on_backward);

}  // namespace syncbn::dist::detail

#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

/// The identity on all outputs at once. When the loss uses only some of them, the others' graphs
/// still run, with undefined gradients: their parameters count as ready instead of being waited
/// for. `on_backward` is called when backward comes to this point.
/// @param anchor a leaf that backward shall reach in any case, with an undefined gradient; then
///   outputs of which none requires a gradient do so afterwards. May be undefined: no anchor.
std::vector<at::Tensor> join_outputs(std::vector<at::Tensor> outputs, const at::Tensor& anchor,
                                     std::function<void()> on_backward);

}  // namespace syncbn::dist::detail

#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <torch/csrc/autograd/function.h>

namespace syncbn::dist::detail {

/// libtorch up to 2.12 holds autograd's nodes by shared_ptr, later versions by intrusive_ptr.
inline constexpr bool kSharesNodes = std::is_same_v<decltype(torch::autograd::Edge::function),
                                                    std::shared_ptr<torch::autograd::Node>>;

template <class Made>
using NodePointer =
    std::conditional_t<kSharesNodes, std::shared_ptr<Made>, c10::intrusive_ptr<Made>>;

template <class Made, class... Arguments>
NodePointer<Made> make_node(Arguments&&... arguments) {
  if constexpr (kSharesNodes) {
    // libtorch's deleteNode(): deleting a deep graph recursively could overflow the stack.
    return {new Made(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); }};
  } else {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace syncbn::dist::detail

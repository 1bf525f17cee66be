#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "transport/operation.h"
#include "transport/reduce.h"

namespace syncbn::dist::detail::shm {

// Operations between the ranks of one host. Tensors may have any strides, and those may differ
// between ranks.

/// @param divisor of what `reduce` gives.
std::unique_ptr<Operation> all_reduce(const Layout& layout, int ranks, const at::Tensor& tensor,
                                      Reduce reduce, int divisor);
/// @param outputs one for each rank, of as many bytes as `input`.
std::unique_ptr<Operation> all_gather(const Layout& layout, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input);
/// @param all contiguous, a row for each rank, with this rank's in its place; a row fits into a
///   slot.
std::unique_ptr<Operation> gather_in_place(const at::Tensor& all);
std::unique_ptr<Operation> broadcast(const Layout& layout, const at::Tensor& tensor, int root);
std::unique_ptr<Operation> barrier();

}  // namespace syncbn::dist::detail::shm

#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "transport/operation.h"
#include "transport/reduce.h"

namespace syncbn::dist::detail::shm {

/// Where the ranks' operations take place.
struct Setting {
  const Layout& layout;
  int rank;
  int ranks;
};

// Tensors may have any strides, and those may differ between ranks.

/// @param divisor of what `reduce` gives.
std::unique_ptr<Operation> all_reduce(const Setting& setting, const at::Tensor& tensor,
                                      Reduce reduce, int divisor);
/// @param outputs one for each rank, of as many bytes as `input`.
std::unique_ptr<Operation> all_gather(const Setting& setting, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input);
/// Of a few values, no more of each rank than a slot holds.
/// @param all contiguous, a row for each rank, with this rank's in its place.
std::unique_ptr<Operation> gather_in_place(const at::Tensor& all);
std::unique_ptr<Operation> broadcast(const Setting& setting, const at::Tensor& tensor, int root);
std::unique_ptr<Operation> barrier();

}  // namespace syncbn::dist::detail::shm

#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

namespace syncbn::data {

/// @throws base::InternalError when an index is outside [0, size).
void check_indices(std::span<const int64_t> indices, int64_t size);

/// The labels of these samples: [B], int64.
at::Tensor gather_labels(std::span<const int64_t> labels, std::span<const int64_t> indices);

}  // namespace syncbn::data

#include "sets/gather.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data {

void check_indices(std::span<const int64_t> indices, int64_t size) {
  for (const int64_t index : indices) {
    if (index >= 0 && index < size) continue;
    throw base::InternalError(fmt::format("sample {} was asked for from a data set of {}", index,
                                          base::counted(size, "sample")));
  }
}

at::Tensor gather_labels(std::span<const int64_t> labels, std::span<const int64_t> indices) {
  at::Tensor target = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  auto* out = target.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) *out++ = labels[static_cast<size_t>(index)];
  return target;
}

}  // namespace syncbn::data

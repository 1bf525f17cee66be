#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include <syncbn/data/dataset.h>
#include <syncbn/data/image.h>

namespace syncbn::train {

/// How many of a contact sheet's images are in a row.
inline int64_t sheet_columns(int64_t images) {
  return std::min<int64_t>(images, 8);
}

/// A batch as the network takes it: its first 32 images, row by row, at most 128 pixels wide each.
/// Nothing if it holds no grey or colour images.
std::optional<data::Image> contact_sheet(const data::Batch& batch,
                                         const data::Normalization& normalization);

}  // namespace syncbn::train

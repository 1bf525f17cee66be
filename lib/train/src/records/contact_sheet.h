#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/image.h>

namespace syncbn::train {

/// How many of a contact sheet's images are in a row.
inline int64_t sheet_columns(int64_t images) {
  return std::min<int64_t>(images, 8);
}

/// first_batch.csv: `label`, the class of each image of a contact sheet of this batch, "cat"; of a
/// mixed one "cat 70 %, dog 30 %". Nothing if targets are no classes.
/// @param names of the classes
std::optional<std::string> sheet_labels(const data::Batch& batch,
                                        const std::vector<std::string>& names);

/// A batch as the network takes it: its first 32 images, row by row, at most 128 pixels wide each.
/// Nothing if it holds no grey or colour images.
std::optional<data::Image> contact_sheet(const data::Batch& batch,
                                         const data::Normalization& normalization);

}  // namespace syncbn::train

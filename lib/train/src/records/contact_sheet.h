#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/image.h>

namespace syncbn::train {

/// Number of images in a row of a contact sheet.
inline int64_t sheet_columns(int64_t images) {
  return std::min<int64_t>(images, 8);
}

/// first_batch.csv: `label`, the class of each image of a contact sheet of this batch: "cat", or
/// "cat 70 %, dog 30 %" if it is mixed. Nothing if the targets are not classes.
/// @param names of the classes
std::optional<std::string> sheet_labels(const data::Batch& batch,
                                        const std::vector<std::string>& names);

/// A batch as the network receives it: its first 32 images, row by row, each at most 128 pixels
/// wide. Nothing unless it holds grey or colour images.
std::optional<data::Image> contact_sheet(const data::Batch& batch,
                                         const data::Normalization& normalization);

}  // namespace syncbn::train

#include "records/contact_sheet.h"

#include <syncbn/data/image_ops.h>

#include <algorithm>
#include <vector>

#include "records/pictures.h"

namespace syncbn::train {

std::optional<data::Image> contact_sheet(const data::Batch& batch,
                                         const data::Normalization& normalization) {
  constexpr int64_t kMaxImages = 32;
  const bool are_images =
      batch.data.dim() == 4 && (batch.data.size(1) == 1 || batch.data.size(1) == 3);
  if (!are_images || batch.size() == 0) return std::nullopt;
  std::vector<at::Tensor> tiles;
  for (int64_t i = 0; i < std::min(batch.size(), kMaxImages); ++i) {
    tiles.push_back(thumbnail(batch, i, normalization).pixels);
  }
  const int64_t columns = sheet_columns(std::ssize(tiles));
  const data::Image sheet = tiled(tiles, columns);
  const int64_t width = std::min(sheet.width, 128 * columns);
  if (width == sheet.width) return sheet;
  return data::resize(sheet, width, std::max<int64_t>(1, sheet.height * width / sheet.width));
}

}  // namespace syncbn::train

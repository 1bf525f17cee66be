#include "records/contact_sheet.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <syncbn/data/image_ops.h>

#include "common/csv.h"
#include "common/naming.h"
#include "records/pictures.h"

namespace syncbn::train {

constexpr int64_t kMaxImages = 32;

std::optional<std::string> sheet_labels(const data::Batch& batch,
                                        const std::vector<std::string>& names) {
  const at::Tensor target = batch.target.cpu();
  const auto classes = std::ssize(names);
  const bool is_mixed = target.dim() == 2 && target.size(1) == classes;
  if (!is_mixed && (target.dim() != 1 || target.is_floating_point())) return std::nullopt;
  const auto name_of = [&](const at::Tensor& label) {
    return class_name(names, label.item<int64_t>());
  };
  std::string text = "label\n";
  for (int64_t i = 0; i < std::min(batch.size(), kMaxImages); ++i) {
    if (!is_mixed) {
      text += csv_field(name_of(target[i])) + "\n";
      continue;
    }
    std::vector<std::string> parts;
    const auto [shares, labels] = target[i].sort(/*dim=*/0, /*descending=*/true);
    for (int64_t k = 0; k < classes && shares[k].item<double>() > 0; ++k) {
      parts.push_back(
          fmt::format("{} {:.0f} %", name_of(labels[k]), 100 * shares[k].item<double>()));
    }
    text += csv_field(parts.size() == 1 ? name_of(labels[0]) : base::join(parts, ", ")) + "\n";
  }
  return text;
}

std::optional<data::Image> contact_sheet(const data::Batch& batch,
                                         const data::Normalization& normalization) {
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

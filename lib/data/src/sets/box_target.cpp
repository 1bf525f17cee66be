#include <syncbn/data/boxes.h>

#include <array>
#include <bit>

#include <syncbn/base/error.h>

namespace syncbn::data {
namespace {

using TargetRow = std::array<double, BoxTarget::kColumns>;

void write_row(std::span<int64_t> target, int64_t row, const TargetRow& values) {
  auto out = target.subspan(static_cast<size_t>(row * BoxTarget::kColumns)).begin();
  for (const double value : values) *out++ = std::bit_cast<int64_t>(value);
}

}  // namespace

void BoxTarget::encode(std::span<int64_t> target, int64_t index, ImageSize original,
                       const ImageSample& sample) {
  constexpr double kMinSide = 1;  // pixels
  const int64_t rows = std::ssize(target) / kColumns;
  write_row(target, 0,
            {static_cast<double>(index), static_cast<double>(original.height),
             static_cast<double>(original.width), static_cast<double>(sample.image.height),
             static_cast<double>(sample.image.width)});
  int64_t row = 1;
  for (const auto& [x1, y1, x2, y2, label] : sample.boxes) {
    if (x2 - x1 < kMinSide || y2 - y1 < kMinSide) continue;
    if (row == rows) throw base::InternalError("a target has more boxes than rows");
    write_row(target, row++, {static_cast<double>(label), x1, y1, x2, y2});
  }
  for (; row < rows; ++row) write_row(target, row, {kUnused, 0, 0, 0, 0});
}

std::vector<int64_t> category_ids(const Dataset& dataset) {
  std::vector<int64_t> ids;
  const auto* const boxes = dynamic_cast<const BoxDataset*>(&dataset);
  if (boxes == nullptr) return ids;
  for (int64_t label = 0; label < boxes->num_classes(); ++label) {
    ids.push_back(boxes->category_id(label));
  }
  return ids;
}

}  // namespace syncbn::data

#include "sets/memory_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/subset.h>

#include "image/orientation.h"
#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kCifarSide = 32;
constexpr int64_t kCifarChannels = 3;

/// @param place file and line, for messages.
void parse_line(std::string_view text, const std::string& place, const CsvLayout& layout,
                CsvSamples& samples) {
  const size_t columns = static_cast<size_t>(std::ranges::count(text, ',')) + 1;
  if (columns != layout.pixels + 1) {
    throw base::UserError(fmt::format("{}: expected {} and a label, found {}", place,
                                      base::counted(layout.pixels, "pixel"),
                                      base::counted(columns, "value")));
  }
  for (size_t column = 0; column < columns; ++column) {
    const bool is_label = column == layout.pixels;
    const int64_t max = is_label ? layout.classes - 1 : layout.max_pixel;
    const std::string_view field = text.substr(0, text.find(','));
    const auto number = whole_number(field);
    if (!number || *number < 0 || *number > max) {
      throw base::UserError(
          fmt::format("{}: column {}: {} must be an integer from 0 to {}, got '{}'", place,
                      column + 1, is_label ? "a label" : "a pixel", max, config::shortened(field)));
    }
    if (is_label) {
      samples.labels.push_back(*number);
    } else {
      samples.pixels.push_back(static_cast<uint8_t>(*number));
      text.remove_prefix(field.size() + 1);
    }
  }
}

CsvSamples parse_file(const std::string& file, std::string_view text, const CsvLayout& layout) {
  CsvSamples samples;
  for (size_t line = 1; !text.empty(); ++line) {
    std::string_view row = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(row.size() + 1, text.size()));
    if (row.ends_with('\r')) row.remove_suffix(1);
    parse_line(row, fmt::format("{}:{}", file, line), layout, samples);
  }
  return samples;
}

/// An idx file of unsigned bytes.
struct Idx {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> values;
};

Idx read_idx(const fs::path& file, size_t dimensions) {
  const std::string bytes = read_gzip_file(file, kMaxFileBytes);
  const size_t header = 4 + 4 * dimensions;
  // 0x08 stands for "unsigned byte"; the next byte is the number of dimensions.
  if (bytes.size() < header || u32(bytes) != 0x0800 + dimensions) {
    refuse_file(file, fmt::format("it is not an idx file of bytes with {}",
                                  base::counted(dimensions, "dimension")));
  }
  Idx idx{.sizes = {}, .values = {bytes.begin() + static_cast<ptrdiff_t>(header), bytes.end()}};
  // Compares by division: the product of the sizes may overflow.
  const size_t there = idx.values.size();
  size_t named = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    const size_t size = u32(std::string_view(bytes).substr(4 + 4 * d));
    idx.sizes.push_back(static_cast<int64_t>(size));
    if (size != 0 && named > there / size) refuse_file(file, "it is shorter than its header says");
    named *= size;
  }
  if (named != there) refuse_file(file, "its length is not what its header says");
  return idx;
}

/// Adds the records of a CIFAR file: `label_bytes` labels, of which the last one is used, then one
/// plane per channel.
void add_cifar_file(const fs::path& file, size_t label_bytes, StoredImages& images) {
  constexpr auto kPlane = static_cast<size_t>(kCifarSide * kCifarSide);
  const size_t record = label_bytes + kPlane * kCifarChannels;
  const std::string bytes = base::read_file(file, kMaxFileBytes);
  if (bytes.empty()) refuse_file(file, "it is empty");
  if (bytes.size() % record != 0) {
    refuse_file(
        file, base::foreign_file(bytes, fmt::format("its size of {} is not a multiple of "
                                                    "the {} bytes of a record",
                                                    base::counted(bytes.size(), "byte"), record)));
  }
  for (size_t at = 0; at < bytes.size(); at += record) {
    const auto label = static_cast<uint8_t>(bytes[at + label_bytes - 1]);
    if (label >= images.classes) {
      refuse_file(file, fmt::format("record {} has the label {}; labels are below {}", at / record,
                                    label, images.classes));
    }
    images.labels.push_back(label);
    const size_t first = at + label_bytes;
    for (size_t i = 0; i < kPlane; ++i) {
      for (size_t c = 0; c < kCifarChannels; ++c) {
        images.pixels.push_back(static_cast<uint8_t>(bytes[first + c * kPlane + i]));
      }
    }
  }
}

}  // namespace

CsvSamples read_labelled_csv(const fs::path& path, const CsvLayout& layout, double test_fraction,
                             Split split) {
  const auto samples =
      parse_file(path.string(), read_gzip_file(path, layout.max_file_bytes), layout);
  const HeldOut parts = hold_out(std::ssize(samples.labels), samples.labels, test_fraction);
  CsvSamples chosen;
  for (const int64_t index : split == Split::kTest ? parts.held_out : parts.train) {
    const auto size = static_cast<ptrdiff_t>(layout.pixels);
    const auto first = samples.pixels.begin() + index * size;
    chosen.pixels.insert(chosen.pixels.end(), first, first + size);
    chosen.labels.push_back(samples.labels[static_cast<size_t>(index)]);
  }
  if (chosen.labels.empty()) {
    throw base::UserError(fmt::format(
        "{}: none of its {} samples is in the {} split (test_fraction is {}); give a longer file",
        path.string(), samples.labels.size(), split == Split::kTest ? "test" : "train",
        test_fraction));
  }
  return chosen;
}

StoredImages read_mnist(const fs::path& image_file, const fs::path& label_file) {
  Idx pixels = read_idx(image_file, 3);
  const Idx labels = read_idx(label_file, 1);
  if (pixels.sizes[0] != labels.sizes[0]) {
    refuse_file(label_file,
                fmt::format("it has {}, and '{}' has {}", base::counted(labels.sizes[0], "label"),
                            image_file.string(), base::counted(pixels.sizes[0], "image")));
  }
  if (pixels.values.empty()) refuse_file(image_file, "it has no pixels");
  StoredImages images{.channels = 1,
                      .size = {pixels.sizes[2], pixels.sizes[1]},
                      .pixels = std::move(pixels.values),
                      .labels = {labels.values.begin(), labels.values.end()}};
  for (size_t i = 0; i < images.labels.size(); ++i) {
    if (images.labels[i] < images.classes) continue;
    refuse_file(label_file,
                fmt::format("sample {} has the label {}; labels are 0 to 9", i, images.labels[i]));
  }
  return images;
}

StoredImages read_cifar(const std::vector<fs::path>& files, int64_t classes) {
  StoredImages images{
      .channels = kCifarChannels, .size = {kCifarSide, kCifarSide}, .classes = classes};
  for (const fs::path& file : files) add_cifar_file(file, classes == 100 ? 2 : 1, images);
  return images;
}

}  // namespace syncbn::data::detail

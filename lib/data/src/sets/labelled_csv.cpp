#include "sets/labelled_csv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

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
    const auto number = base::parse_number<int64_t>(field);
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

CsvSamples choose_split(const CsvSamples& samples, const CsvLayout& layout, double test_fraction,
                        Split split) {
  std::vector<int64_t> seen(static_cast<size_t>(layout.classes));
  CsvSamples chosen;
  for (size_t i = 0; i < samples.labels.size(); ++i) {
    const auto before = static_cast<double>(seen[static_cast<size_t>(samples.labels[i])]++);
    const bool is_test =
        std::floor((before + 1) * test_fraction) > std::floor(before * test_fraction);
    if (is_test != (split == Split::kTest)) continue;
    const auto first = samples.pixels.begin() + static_cast<ptrdiff_t>(i * layout.pixels);
    chosen.pixels.insert(chosen.pixels.end(), first, first + static_cast<ptrdiff_t>(layout.pixels));
    chosen.labels.push_back(samples.labels[i]);
  }
  return chosen;
}

}  // namespace

CsvSamples read_labelled_csv(const std::filesystem::path& path, const CsvLayout& layout,
                             double test_fraction, Split split) {
  const auto samples =
      parse_file(path.string(), read_gzip_file(path, layout.max_file_bytes), layout);
  if (samples.labels.empty()) {
    throw base::UserError(
        fmt::format("cannot read the data file '{}': it is empty", path.string()));
  }
  auto chosen = choose_split(samples, layout, test_fraction, split);
  if (chosen.labels.empty()) {
    throw base::UserError(fmt::format(
        "{}: none of its {} samples is in the {} split (test_fraction is {}); give a longer file",
        path.string(), samples.labels.size(), to_string(split), test_fraction));
  }
  return chosen;
}

}  // namespace syncbn::data::detail

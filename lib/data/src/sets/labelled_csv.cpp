#include "sets/labelled_csv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "sets/gzip_file.h"

namespace syncbn::data::detail {
namespace {

/// Reads one line of the file; knows where it is, for messages.
class LineParser {
 public:
  LineParser(const std::string& file, size_t line, const CsvLayout& layout)
      : file_(file), line_(line), layout_(layout) {}

  void parse(std::string_view text, CsvSamples& samples) const {
    const size_t columns = static_cast<size_t>(std::count(text.begin(), text.end(), ',')) + 1;
    if (columns != layout_.pixels + 1) {
      fail(fmt::format("expected {} and a label, found {}", base::counted(layout_.pixels, "pixel"),
                       base::counted(columns, "value")));
    }
    for (size_t column = 0; column < layout_.pixels; ++column) {
      const int64_t pixel = value(take(text), column, layout_.max_pixel, "a pixel");
      samples.pixels.push_back(static_cast<uint8_t>(pixel));
    }
    samples.labels.push_back(value(text, layout_.pixels, layout_.classes - 1, "a label"));
  }

 private:
  static std::string_view take(std::string_view& text) {
    const size_t comma = text.find(',');
    const std::string_view head = text.substr(0, comma);
    text.remove_prefix(comma + 1);
    return head;
  }

  int64_t value(std::string_view text, size_t column, int64_t max, const char* what) const {
    const auto number = base::parse_number<int64_t>(text);
    if (!number || *number < 0 || *number > max) {
      fail(fmt::format("column {}: {} must be an integer from 0 to {}, got '{}'", column + 1, what,
                       max, config::shortened(text)));
    }
    return *number;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw base::UserError(fmt::format("{}:{}: {}", file_, line_, what));
  }

  const std::string& file_;
  size_t line_;
  const CsvLayout& layout_;
};

CsvSamples parse_file(const std::string& file, std::string_view text, const CsvLayout& layout) {
  CsvSamples samples;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    std::string_view row = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (row.ends_with('\r')) row.remove_suffix(1);
    LineParser(file, line, layout).parse(row, samples);
  }
  return samples;
}

CsvSamples choose_split(const CsvSamples& samples, const CsvLayout& layout, double test_fraction,
                        Split split) {
  std::vector<int64_t> seen(static_cast<size_t>(layout.classes));
  CsvSamples chosen;
  for (size_t i = 0; i < samples.labels.size(); ++i) {
    const auto before = static_cast<double>(seen[static_cast<size_t>(samples.labels[i])]++);
    const bool held_out =
        std::floor((before + 1) * test_fraction) > std::floor(before * test_fraction);
    if (held_out != (split == Split::kTest)) continue;
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

#include <syncbn/data/digits.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/data/data_files.h>

#include "gather.h"
#include "gzip_file.h"
#include "hash.h"

namespace syncbn::data {
namespace {

constexpr size_t kPixels = 64;
constexpr int kMaxPixel = 16;
constexpr int kClasses = 10;
constexpr size_t kMaxFileBytes = size_t{64} << 20;  // the shipped file has 0.26 MB

struct Sample {
  std::array<uint8_t, kPixels> pixels;
  uint8_t label;
};

/// Reads one line of the file; knows where it is, for messages.
class LineParser {
 public:
  LineParser(const std::string& file, size_t line) : file_(file), line_(line) {}

  Sample parse(std::string_view text) const {
    const size_t columns = static_cast<size_t>(std::count(text.begin(), text.end(), ',')) + 1;
    if (columns != kPixels + 1) {
      fail(fmt::format("expected {} pixels and a label, found {} values", kPixels, columns));
    }
    Sample sample{};
    for (size_t column = 0; column < kPixels; ++column) {
      sample.pixels[column] = value(take(text), column, kMaxPixel, "a pixel");
    }
    sample.label = value(text, kPixels, kClasses - 1, "a label");
    return sample;
  }

 private:
  static std::string_view take(std::string_view& text) {
    const size_t comma = text.find(',');
    const std::string_view head = text.substr(0, comma);
    text.remove_prefix(comma + 1);
    return head;
  }

  uint8_t value(std::string_view text, size_t column, int max, const char* what) const {
    int number = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || stop != end || number < 0 || number > max) {
      fail(fmt::format("column {}: {} must be an integer from 0 to {}, got '{}'", column + 1, what,
                       max, config::shortened(text)));
    }
    return static_cast<uint8_t>(number);
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw base::UserError(fmt::format("{}:{}: {}", file_, line_, what));
  }

  const std::string& file_;
  size_t line_;
};

std::vector<Sample> parse_file(const std::string& file, std::string_view text) {
  std::vector<Sample> samples;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    std::string_view row = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (row.ends_with('\r')) row.remove_suffix(1);
    samples.push_back(LineParser(file, line).parse(row));
  }
  return samples;
}

/// Holds out every k-th sample of a class, k = 1 / test_fraction: the test split is spread over the
/// whole file, which is ordered by writer.
std::vector<Sample> choose_split(const std::vector<Sample>& samples, double test_fraction,
                                 Split split) {
  std::array<int64_t, kClasses> seen{};
  std::vector<Sample> chosen;
  for (const Sample& sample : samples) {
    const auto before = static_cast<double>(seen[sample.label]++);
    const bool held_out =
        std::floor((before + 1) * test_fraction) > std::floor(before * test_fraction);
    if (held_out == (split == Split::kTest)) chosen.push_back(sample);
  }
  return chosen;
}

class Digits : public Dataset {
 public:
  explicit Digits(const std::vector<Sample>& samples) {
    Fnv1a hash;
    for (const Sample& sample : samples) {
      for (const uint8_t pixel : sample.pixels) {
        pixels_.push_back(static_cast<float>(pixel) / kMaxPixel);
        hash.add_byte(pixel);
      }
      labels_.push_back(sample.label);
      hash.add_byte(sample.label);
    }
    fingerprint_ = hash.value();
  }

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }

  Batch get_batch(std::span<const int64_t> indices) const override {
    check_indices(indices, size());
    at::Tensor data = at::empty({static_cast<int64_t>(indices.size()), 1, 8, 8}, at::kFloat);
    auto* out = data.mutable_data_ptr<float>();
    for (const int64_t index : indices) {
      out = std::copy_n(&pixels_[static_cast<size_t>(index) * kPixels], kPixels, out);
    }
    return {std::move(data), gather_labels(labels_, indices)};
  }

  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return kClasses; }
  std::vector<int64_t> sample_shape() const override { return {1, 8, 8}; }
  uint64_t fingerprint() const override { return fingerprint_; }

 private:
  std::vector<float> pixels_;
  std::vector<int64_t> labels_;
  uint64_t fingerprint_ = 0;
};

}  // namespace

void DigitsOptions::describe(config::Schema<DigitsOptions>& schema) {
  schema.field("path", &DigitsOptions::path,
               "the file, CSV or gzipped CSV; empty: the digits.csv.gz that ships with syncbn");
  schema
      .field("test_fraction", &DigitsOptions::test_fraction,
             "share of each class that is held out as the test split")
      .above(0)
      .below(1);
}

std::shared_ptr<const Dataset> load_digits(const DigitsOptions& options, Split split) {
  const std::filesystem::path path =
      options.path.empty() ? find_data_file("digits.csv.gz") : std::filesystem::path(options.path);
  const auto samples = parse_file(path.string(), read_gzip_file(path, kMaxFileBytes));
  if (samples.empty()) {
    throw base::UserError(
        fmt::format("cannot read the data file '{}': it is empty", path.string()));
  }
  const auto chosen = choose_split(samples, options.test_fraction, split);
  if (chosen.empty()) {
    throw base::UserError(fmt::format(
        "{}: none of its {} samples is in the {} split (test_fraction is {}); give a longer file",
        path.string(), samples.size(), to_string(split), options.test_fraction));
  }
  return std::make_shared<const Digits>(chosen);
}

}  // namespace syncbn::data

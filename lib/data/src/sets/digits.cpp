#include <syncbn/data/digits.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include <syncbn/base/hash.h>
#include <syncbn/data/data_files.h>

#include "sets/gather.h"
#include "sets/labelled_csv.h"

namespace syncbn::data {
namespace {

constexpr detail::CsvLayout kLayout = {
    .pixels = 64,
    .max_pixel = 16,
    .classes = 10,
    .max_file_bytes = size_t{64} << 20,  // the shipped file has 0.26 MB
};

class Digits : public Dataset {
 public:
  explicit Digits(const detail::CsvSamples& samples) : labels_(samples.labels) {
    base::Fnv1a hash;  // of each sample's pixels, then its label
    for (size_t i = 0; i < samples.pixels.size(); ++i) {
      pixels_.push_back(static_cast<float>(samples.pixels[i]) / kLayout.max_pixel);
      hash.add_byte(samples.pixels[i]);
      if ((i + 1) % kLayout.pixels != 0) continue;
      hash.add_byte(static_cast<uint8_t>(labels_[i / kLayout.pixels]));
    }
    fingerprint_ = hash.value();
  }

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }

  Batch get_batch(std::span<const int64_t> indices) const override {
    check_indices(indices, size());
    at::Tensor data = at::empty({static_cast<int64_t>(indices.size()), 1, 8, 8}, at::kFloat);
    auto* out = data.mutable_data_ptr<float>();
    for (const int64_t index : indices) {
      out = std::copy_n(&pixels_[static_cast<size_t>(index) * kLayout.pixels], kLayout.pixels, out);
    }
    return {std::move(data), gather_labels(labels_, indices)};
  }

  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return kLayout.classes; }
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
  const auto chosen = detail::read_labelled_csv(path, kLayout, options.test_fraction, split);
  return std::make_shared<const Digits>(chosen);
}

}  // namespace syncbn::data

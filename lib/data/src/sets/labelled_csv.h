#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>

namespace syncbn::data::detail {

/// Each line has `pixels` integers from 0 to `max_pixel` and a label below `classes`.
struct CsvLayout {
  size_t pixels = 0;
  int max_pixel = 255;
  int64_t classes = 10;
  size_t max_file_bytes = 0;
};

struct CsvSamples {
  std::vector<uint8_t> pixels;  ///< of all samples
  std::vector<int64_t> labels;
};

/// The samples of one split of a CSV file, plain or gzipped. Every k-th sample of each class is in
/// the test split, k = 1 / test_fraction.
/// @throws base::UserError naming file, line and column of a wrong value, or if the split is empty.
CsvSamples read_labelled_csv(const std::filesystem::path& path, const CsvLayout& layout,
                             double test_fraction, Split split);

}  // namespace syncbn::data::detail

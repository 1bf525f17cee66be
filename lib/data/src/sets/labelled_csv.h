#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>

namespace syncbn::data::detail {

/// What a line of the file is: `pixels` integers from 0 to `max_pixel`, and a label below
/// `classes`.
struct CsvLayout {
  size_t pixels = 0;
  int max_pixel = 255;
  int64_t classes = 10;
  size_t max_file_bytes = 0;
};

struct CsvSamples {
  std::vector<uint8_t> pixels;  ///< of one sample after the other
  std::vector<int64_t> labels;
};

/// The samples of one split of a CSV file, plain or gzipped. Held out is every k-th sample of a
/// class, k = 1 / test_fraction, so that the test split is spread over the whole file.
/// @throws base::UserError naming file, line, column and what is wrong there, or that the split is
///   empty.
CsvSamples read_labelled_csv(const std::filesystem::path& path, const CsvLayout& layout,
                             double test_fraction, Split split);

}  // namespace syncbn::data::detail

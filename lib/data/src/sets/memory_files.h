#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/image.h>

namespace syncbn::data::detail {

constexpr size_t kMaxFileBytes = size_t{4} << 30;  // of an uncompressed file

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

/// The samples of one split of a CSV file, plain or gzipped. Every (1 / test_fraction)-th sample of
/// each class is in the test split.
/// @throws base::UserError naming file, line and column of a wrong value, or if the split is empty.
CsvSamples read_labelled_csv(const std::filesystem::path& path, const CsvLayout& layout,
                             double test_fraction, Split split);

/// Images of one size in memory, each [height, width, channels], and their labels.
struct StoredImages {
  int64_t channels = 1;
  ImageSize size;
  int64_t classes = 10;
  std::vector<uint8_t> pixels = {};
  std::vector<int64_t> labels = {};
};

/// The images of an idx file, plain or gzipped, with the labels of another.
/// @throws base::UserError naming the file that contradicts its header or the other file, or that
///   has a label above 9.
StoredImages read_mnist(const std::filesystem::path& images, const std::filesystem::path& labels);

/// The images of files in CIFAR's binary form.
/// @param classes 10, or 100 with labels of two bytes
/// @throws base::UserError naming a file with an incomplete record or a label out of range.
StoredImages read_cifar(const std::vector<std::filesystem::path>& files, int64_t classes);

}  // namespace syncbn::data::detail

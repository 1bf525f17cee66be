// Data sets that are kept in memory: digits, MNIST, CIFAR, CSV.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>
#include <syncbn/data/data_files.h>
#include <syncbn/data/digits.h>

#include "sets/file_bytes.h"
#include "sets/gather.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = size_t{4} << 30;  // uncompressed
constexpr int64_t kCifarSide = 32;
constexpr int64_t kCifarChannels = 3;

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

/// The samples of one split of a CSV file, plain or gzipped. Every k-th sample of each class is in
/// the test split, k = 1 / test_fraction.
/// @throws base::UserError naming file, line and column of a wrong value, or if the split is empty.
CsvSamples read_labelled_csv(const std::filesystem::path& path, const CsvLayout& layout,
                             double test_fraction, Split split) {
  const auto samples =
      parse_file(path.string(), detail::read_gzip_file(path, layout.max_file_bytes), layout);
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

constexpr CsvLayout kDigitsLayout = {
    .pixels = 64,
    .max_pixel = 16,
    .classes = 10,
    .max_file_bytes = size_t{64} << 20,  // the shipped file has 0.26 MB
};

class Digits : public Dataset {
 public:
  explicit Digits(const CsvSamples& samples) : labels_(samples.labels) {
    base::Fnv1a hash;  // of each sample's pixels, then its label
    for (size_t i = 0; i < samples.pixels.size(); ++i) {
      pixels_.push_back(static_cast<float>(samples.pixels[i]) / kDigitsLayout.max_pixel);
      hash.add_byte(samples.pixels[i]);
      if ((i + 1) % kDigitsLayout.pixels != 0) continue;
      hash.add_byte(static_cast<uint8_t>(labels_[i / kDigitsLayout.pixels]));
    }
    fingerprint_ = hash.value();
  }

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }

  Batch get_batch(std::span<const int64_t> indices) const override {
    check_indices(indices, size());
    at::Tensor data = at::empty({static_cast<int64_t>(indices.size()), 1, 8, 8}, at::kFloat);
    auto* out = data.mutable_data_ptr<float>();
    for (const int64_t index : indices) {
      out = std::copy_n(&pixels_[static_cast<size_t>(index) * kDigitsLayout.pixels],
                        kDigitsLayout.pixels, out);
    }
    return {std::move(data), gather_labels(labels_, indices)};
  }

  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return kDigitsLayout.classes; }
  std::vector<int64_t> sample_shape() const override { return {1, 8, 8}; }
  uint64_t fingerprint() const override { return fingerprint_; }

 private:
  std::vector<float> pixels_;
  std::vector<int64_t> labels_;
  uint64_t fingerprint_ = 0;
};

/// Images of one size in memory, each [height, width, channels], and their labels.
struct StoredImages {
  int64_t channels = 1;
  ImageSize size;
  int64_t classes = 10;
  std::vector<uint8_t> pixels = {};
  std::vector<int64_t> labels = {};
};

class MemorySet : public detail::ImageSet {
 public:
  MemorySet(const std::string& kind, const ImageSetOptions& options, Split split,
            StoredImages images)
      : ImageSetOf({kind, options, split, {.channels = images.channels, .size = images.size}}),
        images_(std::move(images)) {
    base::Fnv1a hash;
    for (const uint8_t value : images_.pixels) hash.add_byte(value);
    for (const int64_t label : images_.labels) hash.add(static_cast<uint64_t>(label));
    fingerprint_ = hash.value();
  }

  int64_t size() const override { return std::ssize(images_.labels); }
  std::span<const int64_t> labels() const override { return images_.labels; }
  int64_t num_classes() const override { return images_.classes; }
  uint64_t fingerprint() const override { return fingerprint_; }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    Image image(images_.size.width, images_.size.height, images_.channels);
    std::copy_n(images_.pixels.data() + index * std::ssize(image.pixels), image.pixels.size(),
                image.pixels.data());
    format().write(pipeline().run({std::move(image), std::nullopt}, random).image, slot);
    slot.target[0] = images_.labels[static_cast<size_t>(index)];
  }

 private:
  StoredImages images_;
  uint64_t fingerprint_ = 0;
};

[[noreturn]] void fail(const fs::path& file, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the data file '{}': {}", file.string(), why));
}

/// Big-endian.
uint32_t u32(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

/// An idx file of unsigned bytes.
struct Idx {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> values;
};

/// `folder`/`name`, or the same with .gz.
fs::path plain_or_gz(const fs::path& folder, const std::string& name) {
  if (base::exists(folder / name)) return folder / name;
  return folder / (name + ".gz");
}

Idx read_idx(const fs::path& file, size_t dimensions) {
  const std::string bytes = detail::read_gzip_file(file, kMaxFileBytes);
  const size_t header = 4 + 4 * dimensions;
  // 0x08 stands for "unsigned byte"; the next byte is the number of dimensions.
  if (bytes.size() < header || u32(bytes, 0) != 0x0800 + dimensions) {
    fail(file, fmt::format("it is not an idx file of bytes with {}",
                           base::counted(dimensions, "dimension")));
  }
  Idx idx{.sizes = {}, .values = {bytes.begin() + static_cast<ptrdiff_t>(header), bytes.end()}};
  // The product of the sizes may overflow, so it is compared by division.
  const size_t there = idx.values.size();
  size_t named = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    const size_t size = u32(bytes, 4 + 4 * d);
    idx.sizes.push_back(static_cast<int64_t>(size));
    if (size != 0 && named > there / size) fail(file, "it is shorter than its header says");
    named *= size;
  }
  if (named != there) fail(file, "its length is not what its header says");
  return idx;
}

StoredImages read_mnist(const fs::path& folder, Split split) {
  const std::string prefix = split == Split::kTest ? "t10k" : "train";
  const fs::path image_file = plain_or_gz(folder, prefix + "-images-idx3-ubyte");
  const fs::path label_file = plain_or_gz(folder, prefix + "-labels-idx1-ubyte");
  Idx pixels = read_idx(image_file, 3);
  const Idx labels = read_idx(label_file, 1);
  if (pixels.sizes[0] != labels.sizes[0]) {
    fail(label_file,
         fmt::format("it has {}, and '{}' has {}", base::counted(labels.sizes[0], "label"),
                     image_file.string(), base::counted(pixels.sizes[0], "image")));
  }
  if (pixels.sizes[1] < 1 || pixels.sizes[2] < 1) fail(image_file, "its images have no pixels");
  StoredImages images{.channels = 1,
                      .size = {pixels.sizes[2], pixels.sizes[1]},
                      .pixels = std::move(pixels.values),
                      .labels = {labels.values.begin(), labels.values.end()}};
  for (size_t i = 0; i < images.labels.size(); ++i) {
    if (images.labels[i] < images.classes) continue;
    fail(label_file,
         fmt::format("sample {} has the label {}; labels are 0 to 9", i, images.labels[i]));
  }
  return images;
}

/// Adds the records of a CIFAR file: `label_bytes` labels, of which the last one is used, then one
/// plane per channel.
void add_cifar_file(const fs::path& file, size_t label_bytes, StoredImages& images) {
  constexpr auto kPlane = static_cast<size_t>(kCifarSide * kCifarSide);
  const size_t record = label_bytes + kPlane * kCifarChannels;
  const std::string bytes = base::read_file(file, kMaxFileBytes);
  if (bytes.empty() || bytes.size() % record != 0) {
    fail(file, fmt::format("its size of {} is not a multiple of the {} bytes of a record",
                           base::counted(bytes.size(), "byte"), record));
  }
  for (size_t at = 0; at < bytes.size(); at += record) {
    const auto label = static_cast<uint8_t>(bytes[at + label_bytes - 1]);
    if (label >= images.classes) {
      fail(file, fmt::format("record {} has the label {}; labels are below {}", at / record, label,
                             images.classes));
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

std::shared_ptr<const Dataset> load_cifar(const std::string& kind, const CifarOptions& options,
                                          Split split, int64_t classes,
                                          const std::vector<std::string>& files) {
  if (split == Split::kVal) return nullptr;
  StoredImages images{
      .channels = kCifarChannels, .size = {kCifarSide, kCifarSide}, .classes = classes};
  for (const std::string& file : files) {
    add_cifar_file(fs::path(options.path) / file, classes == 100 ? 2 : 1, images);
  }
  return std::make_shared<const MemorySet>(kind, options, split, std::move(images));
}

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
  if (split == Split::kVal) return nullptr;
  const std::filesystem::path path =
      options.path.empty() ? find_data_file("digits.csv.gz") : std::filesystem::path(options.path);
  const auto chosen = read_labelled_csv(path, kDigitsLayout, options.test_fraction, split);
  return std::make_shared<const Digits>(chosen);
}

void MnistOptions::describe(config::Schema<MnistOptions>& schema) {
  schema
      .field("path", &MnistOptions::path,
             "the folder of train-images-idx3-ubyte, ... and t10k-labels-idx1-ubyte, plain or .gz")
      .required();
  detail::describe_image_set(schema);
}

void CifarOptions::describe(config::Schema<CifarOptions>& schema) {
  schema
      .field("path", &CifarOptions::path,
             "the folder of the binary version: data_batch_1.bin, ... or train.bin and test.bin")
      .required();
  detail::describe_image_set(schema);
}

void CsvImagesOptions::describe(config::Schema<CsvImagesOptions>& schema) {
  constexpr double kMaxSide = 4096;
  schema.field("path", &CsvImagesOptions::path, "the file, CSV or gzipped CSV").required();
  schema.field("height", &CsvImagesOptions::height, "height of the images")
      .between(1, kMaxSide)
      .unit("px");
  schema.field("width", &CsvImagesOptions::width, "width of the images")
      .between(1, kMaxSide)
      .unit("px");
  schema.field("classes", &CsvImagesOptions::classes, "labels are below this")
      .between(1, 1'000'000);
  schema
      .field("test_fraction", &CsvImagesOptions::test_fraction,
             "share of each class that is held out as the test split")
      .above(0)
      .below(1);
  detail::describe_image_set(schema);
}

std::shared_ptr<const Dataset> load_mnist(const MnistOptions& options, Split split) {
  if (split == Split::kVal) return nullptr;
  return std::make_shared<const MemorySet>("mnist", options, split,
                                           read_mnist(options.path, split));
}

std::shared_ptr<const Dataset> load_cifar10(const CifarOptions& options, Split split) {
  std::vector<std::string> files = {"test_batch.bin"};
  if (split != Split::kTest) {
    files = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
             "data_batch_5.bin"};
  }
  return load_cifar("cifar10", options, split, 10, files);
}

std::shared_ptr<const Dataset> load_cifar100(const CifarOptions& options, Split split) {
  return load_cifar("cifar100", options, split, 100,
                    {split == Split::kTest ? "test.bin" : "train.bin"});
}

std::shared_ptr<const Dataset> load_csv_images(const CsvImagesOptions& options, Split split) {
  if (split == Split::kVal) return nullptr;
  auto samples = read_labelled_csv(options.path,
                                   {.pixels = static_cast<size_t>(options.height * options.width),
                                    .max_pixel = 255,
                                    .classes = options.classes,
                                    .max_file_bytes = kMaxFileBytes},
                                   options.test_fraction, split);
  StoredImages images{.channels = 1,
                      .size = {options.width, options.height},
                      .classes = options.classes,
                      .pixels = std::move(samples.pixels),
                      .labels = std::move(samples.labels)};
  return std::make_shared<const MemorySet>("csv_images", options, split, std::move(images));
}

}  // namespace syncbn::data

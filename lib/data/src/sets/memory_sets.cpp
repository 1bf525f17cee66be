#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"
#include "sets/image_set.h"
#include "sets/labelled_csv.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = size_t{4} << 30;  // uncompressed
constexpr int64_t kCifarSide = 32;
constexpr int64_t kCifarChannels = 3;

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
      : ImageSet(kind, options, split, images.channels, images.size), images_(std::move(images)) {
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
    put(pipeline().run({std::move(image), std::nullopt}, random).image, slot.data);
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
  std::error_code unreadable;
  if (fs::exists(folder / name, unreadable)) return folder / name;
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
  StoredImages images{
      .channels = kCifarChannels, .size = {kCifarSide, kCifarSide}, .classes = classes};
  for (const std::string& file : files) {
    add_cifar_file(fs::path(options.path) / file, classes == 100 ? 2 : 1, images);
  }
  return std::make_shared<const MemorySet>(kind, options, split, std::move(images));
}

}  // namespace

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
      .at_least(1)
      .at_most(kMaxSide)
      .unit("px");
  schema.field("width", &CsvImagesOptions::width, "width of the images")
      .at_least(1)
      .at_most(kMaxSide)
      .unit("px");
  schema.field("classes", &CsvImagesOptions::classes, "labels are below this")
      .at_least(1)
      .at_most(1'000'000);
  schema
      .field("test_fraction", &CsvImagesOptions::test_fraction,
             "share of each class that is held out as the test split")
      .above(0)
      .below(1);
  detail::describe_image_set(schema);
}

std::shared_ptr<const Dataset> load_mnist(const MnistOptions& options, Split split) {
  return std::make_shared<const MemorySet>("mnist", options, split,
                                           read_mnist(options.path, split));
}

std::shared_ptr<const Dataset> load_cifar10(const CifarOptions& options, Split split) {
  std::vector<std::string> files = {"test_batch.bin"};
  if (split == Split::kTrain) {
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
  auto samples =
      detail::read_labelled_csv(options.path,
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

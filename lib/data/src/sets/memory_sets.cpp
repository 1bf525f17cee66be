// Data sets that are kept in memory: digits, MNIST, CIFAR, CSV.
#include <ATen/ops/empty.h>

#include <filesystem>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/hash.h>
#include <syncbn/data/data_files.h>
#include <syncbn/data/digits.h>

#include "sets/gather.h"
#include "sets/image_set.h"
#include "sets/memory_files.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

using detail::CsvLayout;
using detail::CsvSamples;
using detail::read_labelled_csv;
using detail::StoredImages;

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

std::shared_ptr<const Dataset> load_cifar(const std::string& kind, const CifarOptions& options,
                                          Split split, int64_t classes,
                                          const std::vector<std::string>& files) {
  if (split == Split::kVal) return nullptr;
  std::vector<fs::path> paths;
  for (const std::string& file : files) paths.push_back(fs::path(options.path) / file);
  return std::make_shared<const MemorySet>(kind, options, split,
                                           detail::read_cifar(paths, classes));
}

/// `folder`/`name`, unless there is only `folder`/`name`.gz.
fs::path plain_or_gz(const fs::path& folder, const std::string& name) {
  const fs::path plain = folder / name, packed = folder / (name + ".gz");
  return base::exists(packed) && !base::exists(plain) ? packed : plain;
}

template <class Options>
void describe_test_fraction(config::Schema<Options>& schema) {
  schema
      .field("test_fraction", &Options::test_fraction,
             "share of each class that is held out as the test split")
      .above(0)
      .below(1);
}

}  // namespace

void DigitsOptions::describe(config::Schema<DigitsOptions>& schema) {
  schema.field("path", &DigitsOptions::path,
               "the file, CSV or gzipped CSV; empty: the digits.csv.gz that ships with syncbn");
  describe_test_fraction(schema);
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
  describe_test_fraction(schema);
  detail::describe_image_set(schema);
}

std::shared_ptr<const Dataset> load_mnist(const MnistOptions& options, Split split) {
  if (split == Split::kVal) return nullptr;
  const std::string prefix = split == Split::kTest ? "t10k" : "train";
  return std::make_shared<const MemorySet>(
      "mnist", options, split,
      detail::read_mnist(plain_or_gz(options.path, prefix + "-images-idx3-ubyte"),
                         plain_or_gz(options.path, prefix + "-labels-idx1-ubyte")));
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
                                    .max_file_bytes = detail::kMaxFileBytes},
                                   options.test_fraction, split);
  StoredImages images{.channels = 1,
                      .size = {options.width, options.height},
                      .classes = options.classes,
                      .pixels = std::move(samples.pixels),
                      .labels = std::move(samples.labels)};
  return std::make_shared<const MemorySet>("csv_images", options, split, std::move(images));
}

}  // namespace syncbn::data

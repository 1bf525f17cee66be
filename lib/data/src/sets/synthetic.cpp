#include <syncbn/data/synthetic.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/base/hash.h>

#include "mix64.h"
#include "sets/gather.h"

namespace syncbn::data {
namespace {

/// The mean of a class: kCells x kCells cells per channel, each +kSignal or -kSignal.
constexpr int64_t kCells = 4;
constexpr float kSignal = 0.5F;

// Upper bounds on options: larger values are typing errors.
constexpr int64_t kMaxImages = 100'000'000;
constexpr int64_t kMaxClasses = 1'000'000;
constexpr int64_t kMaxChannels = 4096;
constexpr int64_t kMaxSide = 16'384;         // pixels
constexpr int64_t kMaxValues = 100'000'000;  // of one image

std::optional<std::string> image_size_fault(const SyntheticOptions& options) {
  const int64_t values = options.channels * options.height * options.width;
  if (values <= kMaxValues) return std::nullopt;
  return fmt::format("an image of {} x {} x {} has {} values; at most {} are possible",
                     options.channels, options.height, options.width, values, kMaxValues);
}

class Synthetic : public Dataset {
 public:
  Synthetic(const SyntheticOptions& options, Split split)
      : options_(options),
        key_(mix64(static_cast<uint64_t>(options.seed) ^ mix64(split == Split::kTest ? 1 : 0))) {
    const int64_t size = split == Split::kTest ? options.test_size : options.size;
    labels_.reserve(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) labels_.push_back(i % options.classes);
  }

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }

  Batch get_batch(std::span<const int64_t> indices) const override {
    check_indices(indices, size());
    at::Tensor data = at::empty(
        {static_cast<int64_t>(indices.size()), options_.channels, options_.height, options_.width},
        at::kFloat);
    auto* out = data.mutable_data_ptr<float>();
    for (const int64_t index : indices) out = draw(index, out);
    return {std::move(data), gather_labels(labels_, indices)};
  }

  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return options_.classes; }
  std::vector<int64_t> sample_shape() const override {
    return {options_.channels, options_.height, options_.width};
  }

  /// A hash of everything that determines the pixels.
  uint64_t fingerprint() const override {
    base::Fnv1a hash;
    hash.add(key_);
    for (const int64_t value :
         {size(), options_.channels, options_.height, options_.width, options_.classes}) {
      hash.add(static_cast<uint64_t>(value));
    }
    return hash.value();
  }

 private:
  float* draw(int64_t index, float* out) const {
    const auto label = static_cast<uint64_t>(labels_[static_cast<size_t>(index)]);
    uint64_t counter = mix64(key_ ^ mix64(static_cast<uint64_t>(index)));
    for (int64_t c = 0; c < options_.channels; ++c) {
      for (int64_t y = 0; y < options_.height; ++y) {
        for (int64_t x = 0; x < options_.width; ++x) {
          *out++ = signal(label, c, y, x) + noise(counter++);
        }
      }
    }
    return out;
  }

  float signal(uint64_t label, int64_t channel, int64_t y, int64_t x) const {
    const int64_t row = y * kCells / options_.height;
    const int64_t column = x * kCells / options_.width;
    const auto cell = static_cast<uint64_t>((channel * kCells + row) * kCells + column);
    return (mix64(mix64(label) + cell) & 1) != 0 ? kSignal : -kSignal;
  }

  /// Uniform, with mean 0 and variance 1.
  static float noise(uint64_t counter) {
    const auto unit = static_cast<float>(mix64(counter) >> 40) * 0x1p-24F;
    return (unit - 0.5F) * 2 * std::numbers::sqrt3_v<float>;
  }

  SyntheticOptions options_;
  uint64_t key_;
  std::vector<int64_t> labels_;
};

}  // namespace

void SyntheticOptions::describe(config::Schema<SyntheticOptions>& schema) {
  using Options = SyntheticOptions;
  const auto field = [&](const char* name, int64_t Options::*member, const char* help,
                         int64_t max) -> config::Rules& {
    return schema.field(name, member, help).at_least(1).at_most(static_cast<double>(max));
  };
  field("size", &Options::size, "number of training images", kMaxImages);
  field("test_size", &Options::test_size, "number of test images", kMaxImages);
  field("channels", &Options::channels, "channels of an image", kMaxChannels);
  field("height", &Options::height, "height of an image", kMaxSide).unit("px");
  field("width", &Options::width, "width of an image", kMaxSide).unit("px");
  field("classes", &Options::classes, "number of classes", kMaxClasses);
  schema.field("seed", &Options::seed, "seed of the images, independent of the run's seed");
  schema.check(image_size_fault);
}

std::shared_ptr<const Dataset> make_synthetic(const SyntheticOptions& options, Split split) {
  if (split == Split::kVal) return nullptr;
  return std::make_shared<const Synthetic>(options, split);
}

}  // namespace syncbn::data

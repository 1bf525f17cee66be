// A network that counts the dots in an image. This file registers it, its data and a metric as
// `model: counter`, `data: dots` and `metrics: [off_by]` for configurations.

#include <ATen/Functions.h>
#include <syncbn/base/hash.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>
#include <syncbn/models/model.h>
#include <syncbn/models/norm.h>
#include <syncbn/train/metric.h>
#include <syncbn/train/plugin.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace syncbn;

// ---- a data set ---------------------------------------------------------------------------------

constexpr int64_t kSide = 16;  // pixels

struct DotsOptions {
  int64_t size = 2000;
  int64_t most = 4;

  static void describe(config::Schema<DotsOptions>& schema) {
    schema.field("size", &DotsOptions::size, "images of each split").between(1, 1e6);
    schema.field("most", &DotsOptions::most, "dots in an image, at most").between(1, 20);
  }
};

/// Images [1, 16, 16] with 0 to `most` dots. The label is the number of dots.
class Dots : public data::Dataset {
 public:
  Dots(const DotsOptions& options, data::Split split)
      : options_(options), seed_(split == data::Split::kTest ? 1 : 0) {
    for (int64_t i = 0; i < options.size; ++i) labels_.push_back(i % num_classes());
  }

  int64_t size() const override { return options_.size; }
  int64_t num_classes() const override { return options_.most + 1; }
  std::vector<int64_t> sample_shape() const override { return {1, kSide, kSide}; }
  std::span<const int64_t> labels() const override { return labels_; }

  data::Batch get_batch(std::span<const int64_t> indices) const override {
    std::vector<at::Tensor> images;
    std::vector<int64_t> labels;
    for (const int64_t index : indices) {
      labels.push_back(labels_.at(static_cast<size_t>(index)));
      images.push_back(draw(index, labels.back()));
    }
    return {.data = at::stack(images), .target = at::tensor(labels, at::kLong)};
  }

  uint64_t fingerprint() const override {
    base::Fnv1a hash;
    for (const int64_t value : {options_.size, options_.most, seed_}) {
      hash.add(static_cast<uint64_t>(value));
    }
    return hash.value();
  }

 private:
  /// The random numbers depend only on the sample, so that every rank sees the same image.
  at::Tensor draw(int64_t index, int64_t dots) const {
    data::SampleRandom random(seed_, /*epoch=*/0, index);
    at::Tensor image = at::zeros({1, kSide, kSide});
    auto* const pixels = image.mutable_data_ptr<float>();
    while (dots > 0) {
      float& pixel = pixels[random.below(kSide * kSide)];
      if (pixel == 0) --dots;
      pixel = 1;
    }
    return image;
  }

  DotsOptions options_;
  int64_t seed_;
  std::vector<int64_t> labels_;
};

// ---- a network ----------------------------------------------------------------------------------

struct CounterOptions {
  int64_t width = 16;

  static void describe(config::Schema<CounterOptions>& schema) {
    schema.field("width", &CounterOptions::width, "channels of the convolution").between(1, 1024);
  }
};

class Counter : public models::Model {
 public:
  Counter(const CounterOptions& options, const models::ModelArgs& args) {
    const int64_t channels = args.sample_shape.front();
    conv_ = register_module(
        "conv", torch::nn::Conv2d(
                    torch::nn::Conv2dOptions(channels, options.width, 3).padding(1).bias(false)));
    // sync_batchnorm chooses between statistics of all ranks and of this one.
    norm_ = models::NormFactory(args).with_relu(options.width);
    register_module("norm", norm_.ptr());
    linear_ = register_module("linear", torch::nn::Linear(options.width, args.num_classes));
  }

  at::Tensor forward(at::Tensor input) override {
    return linear_->forward(at::mean(norm_.forward(conv_->forward(input)), {2, 3}) * kSide);
  }

 private:
  torch::nn::Conv2d conv_{nullptr};
  models::NormRelu norm_;
  torch::nn::Linear linear_{nullptr};
};

// ---- a metric -----------------------------------------------------------------------------------

struct OffByOptions {
  int64_t distance = 1;

  static void describe(config::Schema<OffByOptions>& schema) {
    schema.field("distance", &OffByOptions::distance, "between answer and label, at most")
        .at_least(0);
  }
};

/// off_by_DISTANCE: share of the images whose answer is at most this far from the label.
class OffBy : public train::CountedMetric {
 public:
  explicit OffBy(int64_t distance) : distance_(distance) {}

  int64_t num_counts() const override { return 2; }

  at::Tensor counts(const train::Task::Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor answer = outputs.front().argmax(1);
    const at::Tensor is_near = (answer - target).abs().le(distance_);
    return at::stack({is_near.sum(), at::ones_like(target).sum()});
  }

  train::Metric metric(std::span<const int64_t> counts) const override {
    const auto near = static_cast<double>(counts[0]);
    const auto all = static_cast<double>(std::max<int64_t>(counts[1], 1));
    return {.name = "off_by_" + std::to_string(distance_), .value = near / all, .is_share = true};
  }

 private:
  int64_t distance_;
};

}  // namespace

void register_own_experiment() {
  data::DatasetKind::registry().add<DotsOptions>(
      "dots", "images with dots to count",
      [](const DotsOptions& options, data::Split split) -> std::shared_ptr<const data::Dataset> {
        if (split == data::Split::kVal) return nullptr;  // val_fraction can hold out samples
        return std::make_shared<Dots>(options, split);
      });
  models::ModelKind::registry().add<CounterOptions>(
      "counter", "a convolution, and the mean over its places",
      [](const CounterOptions& options, const models::ModelArgs& args) {
        return std::make_shared<Counter>(options, args);
      });
  train::MetricKind::registry().add<OffByOptions>(
      "off_by", "share of the images of which the answer is near to the label",
      [](const OffByOptions& options, const data::Dataset& /*dataset*/) {
        return std::make_unique<OffBy>(options.distance);
      });
}

SYNCBN_PLUGIN(register_own_experiment);

// One component of each kind that docs/extending.md names and no other example has.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/data/sampler.h>
#include <syncbn/data/transforms.h>
#include <syncbn/models/model.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/task.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace {

using namespace syncbn;

struct Nothing {
  static void describe(config::Schema<Nothing>& /*schema*/) {}
};

/// A transform that inverts the image.
class Negative : public data::Transform {
 public:
  void apply(data::ImageSample& sample, data::SampleRandom& /*random*/) const override {
    for (uint8_t& value : sample.image.pixels) value = static_cast<uint8_t>(255 - value);
  }
  bool moves_boxes() const override { return true; }
};

/// A loss: cross entropy plus 100.
class Shifted : public train::Loss {
 public:
  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    return each(logits, target).mean();
  }
  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    return at::cross_entropy_loss(logits, target, {}, at::Reduction::None) + 100;
  }
};

struct SignOptions {
  double lr = 0.01;

  static void describe(config::Schema<SignOptions>& schema) {
    schema.field("lr", &SignOptions::lr, "length of each step").above(0);
  }
};

/// An optimizer whose steps have the same size for each parameter.
class Sign : public train::Optimizer {
 public:
  Sign(double lr, train::NamedTensors parameters) : lr_(lr), parameters_(std::move(parameters)) {}

  double base_lr() const override { return lr_; }
  std::vector<Group> groups() const override { return {{.parameters = parameters_, .lr = lr_}}; }
  void step(double lr, const at::Tensor& found_inf) override {
    if (found_inf.defined() && found_inf.item<float>() != 0) return;
    const at::NoGradGuard no_grad;
    for (auto& [name, parameter] : parameters_) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad().sign(), lr);
    }
    steps_ += 1;
  }
  train::OptimizerState state() const override {
    return {{parameters_.front().first, {{"steps", steps_}}}};
  }
  void load(const train::OptimizerState& state) override {
    steps_.copy_(state.at(parameters_.front().first).at("steps"));
  }

 private:
  double lr_;
  train::NamedTensors parameters_;
  at::Tensor steps_ = at::zeros({}, at::kLong);
};

/// A task: the squared distance from the corner that belongs to the label.
class Corners : public train::Task {
 public:
  explicit Corners(int64_t classes) : classes_(classes) {}

  at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const override {
    return distances(outputs, target).mean();
  }
  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor all = distances(outputs, target);
    return at::stack({all.sum(), at::full_like(all[0], all.size(0))});
  }
  int64_t num_counts() const override { return 2; }
  at::Tensor counts(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor is_hit = outputs.front().argmax(1).eq(target);
    return at::stack({is_hit.sum(), at::full_like(is_hit[0], is_hit.size(0), at::kLong)});
  }
  std::vector<train::Metric> metrics(std::span<const int64_t> counts,
                                     std::span<const int64_t> /*records*/) const override {
    const auto all = static_cast<double>(std::max<int64_t>(counts[1], 1));
    return {{.name = "hits", .value = static_cast<double>(counts[0]) / all, .is_share = true}};
  }

 private:
  at::Tensor distances(const Outputs& outputs, const at::Tensor& target) const {
    const at::Tensor corners = at::one_hot(target, classes_);
    return (outputs.front().softmax(1) - corners).square().sum(1);
  }

  int64_t classes_;
};

/// A sampler that goes from the last sample to the first.
class Backwards : public data::Sampler {
 public:
  explicit Backwards(const data::SamplerArgs& args) : args_(args) {}

  std::vector<int64_t> indices() const override {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < size(); ++i) {
      all.push_back(args_.size - 1 - (i * args_.num_replicas + args_.rank));
    }
    return all;
  }
  int64_t size() const override { return args_.size / args_.num_replicas; }
  int num_replicas() const override { return args_.num_replicas; }
  int64_t seed() const override { return args_.seed; }
  std::string order_name() const override { return "backwards"; }

 private:
  data::SamplerArgs args_;
};

/// A network with a batch norm layer of libtorch's.
class PlainNorm : public models::Model {
 public:
  PlainNorm(int64_t inputs, int64_t outputs)
      : norm_(register_module("norm", torch::nn::BatchNorm1d(inputs))),
        layer_(register_module("layer", torch::nn::Linear(inputs, outputs))) {}
  at::Tensor forward(at::Tensor images) override { return layer_(norm_(images.flatten(1))); }

 private:
  torch::nn::BatchNorm1d norm_;
  torch::nn::Linear layer_;
};

}  // namespace

void register_kinds() {
  models::ModelKind::registry().add<Nothing>(
      "plain_norm", "batch norm, and a layer", [](const Nothing&, const models::ModelArgs& args) {
        return std::make_shared<PlainNorm>(64, args.num_classes);
      });
  data::TransformKind::registry().add<Nothing>(
      "negative", "bright where it was dark",
      [](const Nothing&) { return std::make_shared<const Negative>(); });
  train::LossKind::registry().add<Nothing>(
      "shifted", "cross entropy, and 100",
      [](const Nothing&, const train::LossArgs&) { return std::make_unique<Shifted>(); });
  train::OptimizerKind::registry().add<SignOptions>(
      "sign", "steps of the same length",
      [](const SignOptions& options, const train::NamedTensors& parameters) {
        return std::make_unique<Sign>(options.lr, parameters);
      });
  train::TaskKind::registry().add<Nothing>(
      "corners", "the squared distance from the label's corner",
      [](const Nothing&, const data::Dataset& dataset) {
        return std::make_unique<Corners>(dataset.num_classes());
      });
  data::SamplerKind::registry().add<Nothing>("backwards", "from the last sample to the first",
                                             [](const Nothing&, const data::SamplerArgs& args) {
                                               return std::make_shared<Backwards>(args);
                                             });
}

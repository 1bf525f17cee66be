// Plug-ins that cannot be loaded, or that fail later. The macro FAULT_... selects the fault.
#include <ATen/Functions.h>
#include <syncbn/data/dataset.h>
#include <syncbn/models/model.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/metric.h>
#include <syncbn/train/plugin.h>
#include <syncbn/train/schedule.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using namespace syncbn;

struct NoOptions {
  static void describe(config::Schema<NoOptions>& /*schema*/) {}
};

/// Options with a flaw that shows only once `train` has begun.
struct FlawOptions {
  std::string flaw;

  static void describe(config::Schema<FlawOptions>& schema) {
    schema.field("flaw", &FlawOptions::flaw, "what is wrong");
  }
};

class OneLayer : public models::Model {
 public:
  OneLayer(int64_t inputs, int64_t outputs)
      : layer_(register_module("layer", torch::nn::Linear(inputs, outputs))) {}
  at::Tensor forward(at::Tensor images) override { return layer_(images.flatten(1)); }

 private:
  torch::nn::Linear layer_;
};

/// A network that is correct until it trains.
class Flawed : public models::Model {
 public:
  Flawed(std::string flaw, int64_t outputs)
      : flaw_(std::move(flaw)), layer_(register_module("layer", torch::nn::Linear(64, outputs))) {}

  at::Tensor forward(at::Tensor images) override {
    const at::Tensor out = layer_(images.flatten(1));
    if (flaw_ == "evaluation" && !is_training() && images.size(0) > 1) {
      throw std::runtime_error("no more licences");
    }
    if (!is_training()) return out;
    if (flaw_ == "throws") throw std::runtime_error("no more licences");
    if (flaw_ == "number") throw 42;  // NOLINT
    if (flaw_ == "undefined") return {};
    if (flaw_ == "detached") return out.detach();
    if (flaw_ == "integers") return out.to(at::kLong);
    if (flaw_ == "batch") return out.narrow(0, 1, out.size(0) - 1);
    return out;
  }

 private:
  std::string flaw_;
  torch::nn::Linear layer_;
};

class FlawedLoss : public train::Loss {
 public:
  at::Tensor mean(const at::Tensor& /*logits*/, const at::Tensor& /*target*/) const override {
    throw std::runtime_error("cannot compare");
  }
  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    return mean(logits, target);
  }
};

class FlawedMetric : public train::CountedMetric {
 public:
  explicit FlawedMetric(std::string flaw) : flaw_(std::move(flaw)) {}
  int64_t num_counts() const override { return 1; }
  at::Tensor counts(const train::Task::Outputs&, const at::Tensor& target) const override {
    if (flaw_ == "throws") throw std::runtime_error("cannot count");
    return at::ones({1}, target.options().dtype(flaw_ == "floats" ? at::kFloat : at::kLong));
  }
  train::Metric metric(std::span<const int64_t>) const override {
    return {.name = flaw_ == "space" ? "off by" : "off_by"};
  }

 private:
  std::string flaw_;
};

/// A data set with a batch that cannot be read, or with a negative size.
class FlawedData : public data::Dataset {
 public:
  explicit FlawedData(std::string flaw) : flaw_(std::move(flaw)) {}
  int64_t size() const override { return flaw_ == "size" ? -4 : 16; }
  int64_t num_classes() const override { return 2; }
  std::vector<int64_t> sample_shape() const override { return {1, 8, 8}; }
  std::span<const int64_t> labels() const override { return labels_; }
  data::Batch get_batch(std::span<const int64_t> indices) const override {
    const auto count = static_cast<int64_t>(indices.size());
    if (flaw_ == "throws" && count > 1) throw std::out_of_range("no sample 5");
    return {.data = at::zeros({count, 1, 8, 8}), .target = at::zeros({count}, at::kLong)};
  }
  uint64_t fingerprint() const override { return 1; }

 private:
  std::string flaw_;
  std::vector<int64_t> labels_ = std::vector<int64_t>(16);
};

class Pairs : public data::Dataset {
 public:
  int64_t size() const override { return 8; }
  int64_t num_classes() const override { return 2; }
  std::vector<int64_t> sample_shape() const override { return {3}; }
  std::span<const int64_t> labels() const override { return labels_; }
  data::Batch get_batch(std::span<const int64_t> indices) const override {
    const auto count = static_cast<int64_t>(indices.size());
    return {.data = at::zeros({count, 2}), .target = at::zeros({count}, at::kLong)};
  }
  uint64_t fingerprint() const override { return 1; }

 private:
  std::vector<int64_t> labels_ = {0, 1, 0, 1, 0, 1, 0, 1};
};

class Nameless : public train::CountedMetric {
 public:
  int64_t num_counts() const override { return 1; }
  at::Tensor counts(const train::Task::Outputs&, const at::Tensor& target) const override {
    return at::ones({1}, target.options());
  }
  train::Metric metric(std::span<const int64_t>) const override { return {}; }
};

[[maybe_unused]] void register_faulty() {
#ifdef FAULT_THROWS
  throw std::runtime_error("its licence has expired");
#endif
#ifdef FAULT_NETWORKS
  using Args = models::ModelArgs;
  auto& networks = models::ModelKind::registry();
  networks.add<NoOptions>("throwing", "throws",
                          [](const NoOptions&, const Args&) -> std::shared_ptr<models::Model> {
                            throw std::invalid_argument("width is bad");
                          });
  networks.add<NoOptions>("narrow", "has a layer for other images",
                          [](const NoOptions&, const Args& args) {
                            return std::make_shared<OneLayer>(9, args.num_classes);
                          });
  networks.add<NoOptions>("generous", "has an output too many",
                          [](const NoOptions&, const Args& args) {
                            return std::make_shared<OneLayer>(64, args.num_classes + 1);
                          });
  networks.add<FlawOptions>("flawed", "fails when it trains",
                            [](const FlawOptions& options, const Args& args) {
                              return std::make_shared<Flawed>(options.flaw, args.num_classes);
                            });
  train::ScheduleKind::registry().add<NoOptions>(
      "unmade", "throws",
      [](const NoOptions&, const train::ScheduleArgs&) -> std::unique_ptr<train::Schedule> {
        throw std::runtime_error("no curve");
      });
  train::LossKind::registry().add<NoOptions>(
      "flawed", "fails when it is called",
      [](const NoOptions&, const train::LossArgs&) { return std::make_unique<FlawedLoss>(); });
  train::MetricKind::registry().add<FlawOptions>(
      "flawed", "fails when it counts", [](const FlawOptions& options, const data::Dataset&) {
        return std::make_unique<FlawedMetric>(options.flaw);
      });
  data::DatasetKind::registry().add<FlawOptions>(
      "flawed", "fails when it is read", [](const FlawOptions& options, data::Split split) {
        return split == data::Split::kVal ? nullptr
                                          : std::make_shared<const FlawedData>(options.flaw);
      });
  data::DatasetKind::registry().add<NoOptions>(
      "pairs", "says that its samples are of three numbers",
      [](const NoOptions&, data::Split split) {
        return split == data::Split::kVal ? nullptr : std::make_shared<const Pairs>();
      });
  train::MetricKind::registry().add<NoOptions>(
      "nameless", "has no name",
      [](const NoOptions&, const data::Dataset&) { return std::make_unique<Nameless>(); });
#endif
#ifdef FAULT_TWICE
  train::ScheduleKind::registry().add<NoOptions>("cosine", "a second one",
                                                 [](const NoOptions&, const train::ScheduleArgs&) {
                                                   return std::unique_ptr<train::Schedule>();
                                                 });
#endif
}

}  // namespace

#ifdef FAULT_UNDEFINED
namespace syncbn::train {
void removed_since();
}
SYNCBN_PLUGIN(train::removed_since);
#else

#ifdef FAULT_OTHER_ABI
#undef SYNCBN_VERSION
#define SYNCBN_VERSION "0.0.1"
#undef TORCH_VERSION_MINOR
#define TORCH_VERSION_MINOR 3
#endif

#ifdef FAULT_OTHER_HEADERS
#undef SYNCBN_DETAIL_HEADERS_DIGEST
#define SYNCBN_DETAIL_HEADERS_DIGEST "0123456789ab"
#endif

#ifndef FAULT_NO_ENTRY
SYNCBN_PLUGIN(register_faulty);
#endif
#endif

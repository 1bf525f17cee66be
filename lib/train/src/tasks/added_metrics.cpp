#include "tasks/added_metrics.h"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/component_error.h"
#include "common/naming.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct TopKOptions {
  int64_t k = 3;

  static void describe(config::Schema<TopKOptions>& schema) {
    schema.field("k", &TopKOptions::k, "classes that may hold the label").at_least(1);
  }
};

/// top_K_accuracy: share of the samples whose class is among the k likeliest.
class TopK : public CountedMetric {
 public:
  explicit TopK(int64_t k) : k_(k) {}

  int64_t num_counts() const override { return 2; }

  at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor top = std::get<1>(outputs.front().topk(k_, 1));
    return at::stack(
        {top.eq(target.unsqueeze(1)).sum(), at::scalar_tensor(target.numel(), target.options())});
  }

  Metric metric(std::span<const int64_t> counts) const override {
    return {.name = fmt::format("top_{}_accuracy", k_),
            .value = share_of(counts[0], counts[1]),
            .is_share = true};
  }

 private:
  int64_t k_;
};

struct CalibrationOptions {
  int64_t bins = 15;

  static void describe(config::Schema<CalibrationOptions>& schema) {
    schema.field("bins", &CalibrationOptions::bins, "ranges of equal width of the probability")
        .between(1, 1000);
  }
};

/// Expected calibration error (Guo et al., arXiv:1706.04599, equation 3): the mean distance between
/// the probability of an answer and the share of such answers that is right.
class CalibrationError : public CountedMetric {
 public:
  explicit CalibrationError(int64_t bins) : bins_(bins) {}

  int64_t num_counts() const override { return 3 * bins_; }

  /// For each bin: samples, right answers, and the sum of their probabilities in kUnits.
  at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const override {
    const auto [probability, answer] = outputs.front().to(at::kDouble).softmax(1).max(1);
    const at::Tensor bin = (probability * bins_).ceil().to(at::kLong).sub(1).clamp(0, bins_ - 1);
    const at::Tensor units = (probability * kUnits).round().to(at::kLong);
    const at::Tensor sums = at::zeros({3, bins_}, target.options());
    sums[0].scatter_add_(0, bin, at::ones_like(target));
    sums[1].scatter_add_(0, bin, answer.eq(target).to(at::kLong));
    sums[2].scatter_add_(0, bin, units);
    return sums.flatten();
  }

  Metric metric(std::span<const int64_t> counts) const override {
    const auto bins = static_cast<size_t>(bins_);
    double distance = 0;
    int64_t samples = 0;
    for (size_t bin = 0; bin < bins; ++bin) {
      samples += counts[bin];
      const auto right = static_cast<double>(counts[bins + bin]);
      distance += std::abs(right - static_cast<double>(counts[2 * bins + bin]) / kUnits);
    }
    return {.name = "calibration_error",
            .value = distance / static_cast<double>(std::max<int64_t>(samples, 1)),
            .higher_is_better = false,
            .is_share = true};
  }

 private:
  static constexpr double kUnits = 1 << 24;  // float64 sums of whole units are exact

  int64_t bins_;
};

void expect_classes(const char* metric, const data::Dataset& dataset) {
  if (label_kind(dataset) == LabelKind::kImages) return;
  throw base::UserError(
      fmt::format("{} is for data with one label for each image; leave it out", metric));
}

}  // namespace

MetricKind::Registry& MetricKind::registry() {
  static Registry registry = [] {
    Registry made("metric");
    made.add<TopKOptions>(
        "top_k", "share of the samples whose class is among the k likeliest",
        [](const TopKOptions& options, const data::Dataset& dataset) {
          expect_classes("top_k", dataset);
          if (options.k > dataset.num_classes()) {
            throw base::UserError(fmt::format("top_k: k is {}, and the data has {} classes",
                                              options.k, dataset.num_classes()));
          }
          return std::make_unique<TopK>(options.k);
        });
    made.add<CalibrationOptions>(
        "calibration_error", "expected calibration error (Guo et al., arXiv:1706.04599)",
        [](const CalibrationOptions& options, const data::Dataset& dataset) {
          expect_classes("calibration_error", dataset);
          return std::make_unique<CalibrationError>(options.bins);
        });
    return made;
  }();
  return registry;
}

AddedMetrics::AddedMetrics(const Config& config, const data::Dataset& dataset) {
  naming("metrics", [&] {
    if (!config.metrics.empty() && config.task.type() == "gan") {
      throw base::UserError("a gan gives no answers that they could count; leave them out");
    }
    for (const auto& metric : config.metrics) {
      const std::string name = component_name("metric", metric);
      refusing([&] { return name; },
               [&] {
                 auto made = metric.make(dataset);
                 const int64_t counts = made->num_counts();
                 all_.push_back({.name = name, .num_counts = counts, .metric = std::move(made)});
               });
    }
  });
}

int64_t AddedMetrics::num_counts() const {
  int64_t all = 0;
  for (const Added& one : all_) all += one.num_counts;
  return all;
}

at::Tensor AddedMetrics::counts(const Task::Outputs& outputs, const at::Tensor& target) const {
  std::vector<at::Tensor> all = {at::empty({0}, target.options().dtype(at::kLong))};
  for (const Added& one : all_) {
    all.push_back(
        blaming([&] { return one.name; }, [&] { return one.metric->counts(outputs, target); }));
    const at::Tensor& own = all.back();
    if (own.scalar_type() == at::kLong && own.dim() == 1 && own.numel() == one.num_counts) continue;
    throw base::UserError(
        fmt::format("{} counts {} of shape [{}], and has to count int64 of shape [{}]", one.name,
                    own.dtype().name(), fmt::join(own.sizes(), ", "), one.num_counts));
  }
  return at::cat(all);
}

std::vector<Metric> AddedMetrics::metrics(std::span<const int64_t> counts) const {
  std::vector<Metric> all;
  for (const Added& one : all_) {
    const auto own = static_cast<size_t>(one.num_counts);
    all.push_back(
        blaming([&] { return one.name; }, [&] { return one.metric->metric(counts.first(own)); }));
    counts = counts.subspan(own);
  }
  return all;
}

}  // namespace syncbn::train

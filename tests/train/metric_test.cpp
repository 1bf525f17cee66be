#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/train/metric.h>

#include <cmath>
#include <vector>

#include "support/from_yaml.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::unique_ptr<CountedMetric> metric(const std::string& yaml) {
  const auto images =
      data::make_synthetic({.size = 20, .height = 4, .width = 4, .classes = 4}, data::Split::kTest);
  return test::from_yaml<MetricKind>(yaml, "metrics.0").make(*images);
}

/// The value of the metric over batches that several ranks have counted.
Metric value(const CountedMetric& metric, const std::vector<at::Tensor>& logits,
             const std::vector<at::Tensor>& targets) {
  at::Tensor sum = at::zeros({metric.num_counts()}, at::kLong);
  for (size_t i = 0; i < logits.size(); ++i) sum += metric.counts({logits[i]}, targets[i]);
  const auto* const first = sum.const_data_ptr<int64_t>();
  return metric.metric(std::vector<int64_t>(first, first + sum.numel()));
}

TEST(MetricTest, TopKCountsLabelsAmongTheHighestLogits) {
  const at::Tensor logits = at::tensor({4., 3., 2., 1.}).expand({4, 4});
  const at::Tensor target = at::arange(4);
  const auto top = metric("{type: top_k, k: 3}");
  const Metric result = value(*top, {logits.narrow(0, 0, 1), logits.narrow(0, 1, 3)},
                              {target.narrow(0, 0, 1), target.narrow(0, 1, 3)});
  EXPECT_EQ(result.name, "top_3_accuracy");
  EXPECT_EQ(result.value, 0.75);
  EXPECT_THAT([] { metric("{type: top_k, k: 5}"); },
              ThrowsMessage<base::UserError>(HasSubstr("k is 5, and the data has 4 classes")));
}

TEST(MetricTest, CalibrationErrorIsTheDistanceOfConfidenceFromAccuracy) {
  // Two answers with probability 0.9, one of them right, and two with 0.7, both right. With two
  // bins, the error is |1 - 1.8| + |2 - 1.4| over four samples; with one bin, |3 - 3.2|.
  const auto row = [](double probability) {
    return at::tensor({probability, 1 - probability}, at::kDouble).log();
  };
  const at::Tensor logits = at::stack({row(0.9), row(0.9), row(0.7), row(0.7)});
  const at::Tensor target = at::tensor({0, 1, 0, 0}, at::kLong);
  const auto halves = [&](const std::string& yaml) {
    return value(*metric(yaml), {logits.narrow(0, 0, 1), logits.narrow(0, 1, 3)},
                 {target.narrow(0, 0, 1), target.narrow(0, 1, 3)});
  };
  EXPECT_NEAR(halves("{type: calibration_error, bins: 5}").value, 0.35, 1e-6);
  EXPECT_NEAR(halves("{type: calibration_error, bins: 1}").value, 0.05, 1e-6);
  EXPECT_FALSE(halves("calibration_error").higher_is_better);
}

TEST(MetricTest, WithoutSamplesIsNothing) {
  const std::vector<int64_t> none(45);
  EXPECT_EQ(metric("calibration_error")->metric(none).value, 0);
  EXPECT_TRUE(std::isnan(metric("top_k")->metric({none.data(), 2}).value));
}

}  // namespace
}  // namespace syncbn::train

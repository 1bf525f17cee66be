#include "records/histograms.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <optional>

namespace syncbn::train {
namespace {

/// A histogram of the finite values, with ranges of equal width; nothing if there are none.
std::optional<Histogram> histogram_of(const at::Tensor& tensor) {
  constexpr int64_t kRanges = 64;
  at::Tensor values = (tensor.is_sparse() ? tensor._values() : tensor).to(at::kFloat);
  values = values.masked_select(values.isfinite());
  if (values.numel() == 0) return std::nullopt;
  const auto [least, greatest] = at::aminmax(values);
  Histogram histogram{.min = least.item<double>(),
                      .max = greatest.item<double>(),
                      .count = static_cast<double>(values.numel()),
                      .sum = values.sum(at::kDouble).item<double>(),
                      .sum_of_squares = values.square().sum(at::kDouble).item<double>()};
  // If all values are equal, at::histc() widens the range in the same way.
  const bool is_flat = histogram.min == histogram.max;
  const double begin = histogram.min - (is_flat ? 1 : 0);
  const double end = histogram.max + (is_flat ? 1 : 0);
  const at::Tensor counts = at::histc(values, kRanges, begin, end).cpu().to(at::kDouble);
  const double* const count = counts.const_data_ptr<double>();
  histogram.counts.assign(count, count + kRanges);
  for (int64_t i = 1; i <= kRanges; ++i) {
    histogram.limits.push_back(begin + (end - begin) * static_cast<double>(i) / kRanges);
  }
  return histogram;
}

}  // namespace

void log_histograms(const models::Model& model, int64_t step, RunFolder& folder) {
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const auto log = [&](const std::string& kind, const at::Tensor& tensor) {
      const auto histogram = histogram_of(tensor);
      if (histogram) folder.log_histogram(kind + "/" + item.key(), step, *histogram);
    };
    log("parameters", item.value());
    if (item.value().grad().defined()) log("gradients", item.value().grad());
  }
}

}  // namespace syncbn::train

#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "batch_norm/batch_norm_cpu_loops.h"

// The coefficients that the CPU's loops work with, by channel, made of statistics and parameters.

namespace syncbn::dist::detail::cpu {

inline at::Tensor doubles(at::IntArrayRef size) {
  return at::empty(size, at::kDouble);
}

template <class T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

/// A layer's parameter in double; empty where it has none.
inline std::vector<double> as_doubles(const at::Tensor& parameter) {
  if (!parameter.defined()) return {};
  const auto copy = [](const auto* from, int64_t n) { return std::vector<double>(from, from + n); };
  if (parameter.is_contiguous() && parameter.scalar_type() == at::kFloat) {
    return copy(parameter.const_data_ptr<float>(), parameter.numel());
  }
  const at::Tensor values = parameter.detach().to(at::kDouble).contiguous();
  return copy(values.const_data_ptr<double>(), values.numel());
}

/// Merges the statistics in rows: as BatchNormKernels::merge. @return the count of all.
double merge_rows(const double* rows, int64_t count_of_rows, int64_t stride, int64_t channels,
                  double* mean, double* m2);

inline double value_or(const std::vector<double>& values, int64_t c, double otherwise) {
  return values.empty() ? otherwise : values[static_cast<size_t>(c)];
}

/// Coefficients of y = (x - center) * scale + shift, by channel.
class ForwardTable {
 public:
  ForwardTable(const at::Tensor& weight, const at::Tensor& bias, int64_t channels)
      : weight_(as_doubles(weight)),
        bias_(as_doubles(bias)),
        values_(static_cast<size_t>(2 * channels)),
        scale_(values_.data()),
        shift_(scale_ + channels) {}

  template <class T>
  void set(int64_t c, double mean, double invstd) {
    scale_[c] = invstd * value_or(weight_, c, 1.0);
    // The loops round the mean to T; the difference goes into the shift.
    const double rounding = mean - static_cast<double>(static_cast<T>(mean));
    shift_[c] = value_or(bias_, c, 0.0) - rounding * scale_[c];
  }
  ForwardCoefficients with(const double* center) const { return {center, scale_, shift_}; }

 private:
  const std::vector<double> weight_, bias_;
  std::vector<double> values_;
  double* const scale_;
  double* const shift_;
};

/// Coefficients of dx = (dy - offset) * scale + (x - center) * slope, by channel.
class BackwardTable {
 public:
  BackwardTable(const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd,
                double count)
      : weight_(as_doubles(weight)),
        values_(static_cast<size_t>(3 * mean.size(0))),
        count_(count),
        mean_(mean.const_data_ptr<double>()),
        invstd_(invstd.const_data_ptr<double>()),
        scale_(values_.data()),
        offset_(scale_ + mean.size(0)),
        slope_(offset_ + mean.size(0)) {}

  template <class T>
  void set(int64_t c, double sum_dy, double sum_dy_xmu) {
    scale_[c] = invstd_[c] * value_or(weight_, c, 1.0);
    slope_[c] = -scale_[c] * invstd_[c] * invstd_[c] * sum_dy_xmu / count_;
    offset_[c] = sum_dy / count_;
    // Move the rounding of the mean into the constant; a channel with scale 0 has none.
    const double rounding = mean_[c] - static_cast<double>(static_cast<T>(mean_[c]));
    if (scale_[c] != 0) offset_[c] += rounding * slope_[c] / scale_[c];
  }
  BackwardCoefficients get() const { return {mean_, scale_, offset_, slope_}; }

 private:
  const std::vector<double> weight_;
  std::vector<double> values_;
  const double count_;
  const double* const mean_;
  const double* const invstd_;
  double* const scale_;
  double* const offset_;
  double* const slope_;
};

}  // namespace syncbn::dist::detail::cpu

#pragma once

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

inline at::Tensor as_double(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().to(at::kDouble).contiguous() : tensor;
}

/// Coefficients of y = (x - center) * scale + shift, by channel.
class ForwardTable {
 public:
  ForwardTable(const at::Tensor& weight, const at::Tensor& bias, int64_t channels)
      : weight_(as_double(weight)), bias_(as_double(bias)), values_(doubles({2, channels})) {
    w_ = data_or_null<double>(weight_);
    b_ = data_or_null<double>(bias_);
    scale_ = values_.mutable_data_ptr<double>();
    shift_ = scale_ + channels;
  }

  template <class T>
  void set(int64_t c, double mean, double invstd) {
    scale_[c] = invstd * (w_ != nullptr ? w_[c] : 1.0);
    // The loops round the mean to T; the difference goes into the shift.
    const double rounding = mean - static_cast<double>(static_cast<T>(mean));
    shift_[c] = (b_ != nullptr ? b_[c] : 0.0) - rounding * scale_[c];
  }
  ForwardCoefficients with(const double* center) const { return {center, scale_, shift_}; }

 private:
  const at::Tensor weight_, bias_;
  at::Tensor values_;
  const double* w_;
  const double* b_;
  double* scale_;
  double* shift_;
};

/// Coefficients of dx = (dy - offset) * scale + (x - center) * slope, by channel.
class BackwardTable {
 public:
  BackwardTable(const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd,
                double count)
      : weight_(as_double(weight)), values_(doubles({3, mean.size(0)})), count_(count) {
    w_ = data_or_null<double>(weight_);
    mean_ = mean.const_data_ptr<double>();
    invstd_ = invstd.const_data_ptr<double>();
    scale_ = values_.mutable_data_ptr<double>();
    offset_ = scale_ + mean.size(0);
    slope_ = offset_ + mean.size(0);
  }

  template <class T>
  void set(int64_t c, double sum_dy, double sum_dy_xmu) {
    scale_[c] = invstd_[c] * (w_ != nullptr ? w_[c] : 1.0);
    slope_[c] = -scale_[c] * invstd_[c] * invstd_[c] * sum_dy_xmu / count_;
    offset_[c] = sum_dy / count_;
    // Move the rounding of the mean into the constant; a channel with scale 0 has none.
    const double rounding = mean_[c] - static_cast<double>(static_cast<T>(mean_[c]));
    if (scale_[c] != 0) offset_[c] += rounding * slope_[c] / scale_[c];
  }
  BackwardCoefficients get() const { return {mean_, scale_, offset_, slope_}; }

 private:
  const at::Tensor weight_;
  at::Tensor values_;
  const double count_;
  const double* w_;
  const double* mean_;
  const double* invstd_;
  double* scale_;
  double* offset_;
  double* slope_;
};

}  // namespace syncbn::dist::detail::cpu

#pragma once

#include <gtest/gtest.h>

#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>

namespace syncbn::test {

/// Fails with the largest difference unless |actual - expected| <= atol + rtol * |expected|. The
/// two tensors may have different types and devices.
inline ::testing::AssertionResult close(const at::Tensor& actual, const at::Tensor& expected,
                                        double rtol = 1e-5, double atol = 1e-6) {
  if (!actual.defined() || !expected.defined()) {
    return ::testing::AssertionFailure() << "a tensor is undefined";
  }
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
           << "sizes differ: " << c10::str(actual.sizes()) << " and " << c10::str(expected.sizes());
  }
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble);
  const at::Tensor b = expected.detach().to(at::kCPU, at::kDouble);
  if (at::allclose(a, b, rtol, atol)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "largest difference " << (a - b).abs().max().item<double>()
         << ", expected values up to " << b.abs().max().item<double>();
}

}  // namespace syncbn::test

// The loops of the CPU kernels, for each instruction set of this processor, against plain loops in
// double: lengths that are not a multiple of a vector, parts, and writes beyond the results.

#include "batch_norm/batch_norm_cpu_loops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "dist/guarded.h"
#include "support/skip.h"

namespace syncbn::dist::detail::cpu {
namespace {

using test::Guarded;

/// The layout of values: `runs` runs of `length` values. A row holds all channels, a plane one
/// channel.
struct Layout {
  bool rows;
  int64_t n, c, s;  ///< s is 1 for rows

  int64_t length() const { return rows ? c : s; }
  int64_t runs() const { return rows ? n : n * c; }
  int64_t count() const { return n * c * s; }
  size_t channel(int64_t i) const { return static_cast<size_t>(rows ? i % c : i / s % c); }
  int64_t mask_bytes() const { return runs() * cpu::mask_bytes(length()); }
  const uint8_t* mask_of(const uint8_t* mask, int64_t i) const {
    return mask + i / length() * cpu::mask_bytes(length());
  }
  bool is_set(const uint8_t* mask, int64_t i) const {
    return mask == nullptr || cpu::mask_bit(mask_of(mask, i), i % length());
  }
};

template <class T>
class LoopsCheck {
 public:
  LoopsCheck(const Loops<T>& loops, const Layout& layout, bool aligned, bool stream)
      : loops_(loops), layout_(layout), offset_(aligned ? 0 : 1), stream_(stream) {
    x_ = randoms(10);
    dy_ = randoms(0);
    residual_ = randoms(0);
    for (std::vector<double>* one : {&center_, &scale_, &shift_, &slope_}) {
      for (int64_t c = 0; c < layout.c; ++c) one->push_back(random());
    }
    // An output of exactly 0, and a NaN.
    scale_[0] = shift_[0] = 0;
    residual_.back() = std::numeric_limits<T>::quiet_NaN();
  }

  void expect_moments() {
    std::vector<double> mean(static_cast<size_t>(layout_.c), -1), m2 = mean;
    const auto run = [&](int64_t begin, int64_t end) {
      if (layout_.rows) {
        loops_.moments_rows(x_.data(), {layout_.c, begin, end}, mean.data(), m2.data());
      } else {
        loops_.moments_planes(x_.data(), planes(begin, end), mean.data(), m2.data());
      }
    };
    layout_.rows ? run(0, layout_.n) : in_parts(run);
    const double values = static_cast<double>(layout_.n * layout_.s);
    std::vector<double> exact_mean(mean.size()), exact_m2(mean.size());
    for_all([&](int64_t i, size_t c) { exact_mean[c] += at(x_, i) / values; });
    for_all([&](int64_t i, size_t c) { exact_m2[c] += std::pow(at(x_, i) - exact_mean[c], 2); });
    for (size_t c = 0; c < mean.size(); ++c) {
      EXPECT_NEAR(mean[c], exact_mean[c], 1e-12);
      EXPECT_NEAR(m2[c], exact_m2[c], kTolerance * (exact_m2[c] + 1));
      EXPECT_GE(m2[c], 0);
    }
  }

  void expect_transform(bool add, bool relu) {
    Guarded<T> y(layout_.count(), offset_);
    Guarded<uint8_t> mask(layout_.mask_bytes(), 0);
    const EpilogueData<T> epilogue{add ? residual_.data() : nullptr, relu ? mask.data() : nullptr};
    const ForwardCoefficients k{center_.data(), scale_.data(), shift_.data()};
    in_parts([&](int64_t begin, int64_t end) {
      if (layout_.rows) {
        loops_.transform_rows(x_.data(), y.data(), rows(begin, end), k, epilogue);
      } else {
        loops_.transform_planes(x_.data(), y.data(), planes(begin, end), k, epilogue);
      }
    });
    for_all([&](int64_t i, size_t c) {
      double expected = (at(x_, i) - center_[c]) * scale_[c] + shift_[c];
      if (add) expected += at(residual_, i);
      if (relu && expected < 0) expected = 0;
      expect_near(y.data()[i], expected);
      if (relu) {
        EXPECT_EQ(layout_.is_set(mask.data(), i), !(y.data()[i] <= 0)) << i;
      }
    });
    y.expect_guards();
    mask.expect_guards();
  }

  void expect_backward(bool relu, bool keep) {
    std::vector<uint8_t> mask(static_cast<size_t>(layout_.mask_bytes()));
    for (uint8_t& byte : mask) byte = static_cast<uint8_t>(random_());
    Guarded<T> dx(layout_.count(), offset_), kept(layout_.count(), offset_);
    GradientData<T> gradient{dy_.data(), relu ? mask.data() : nullptr, nullptr};
    std::vector<double> sum(static_cast<size_t>(layout_.c), -1), with_x = sum;
    const auto reduce = [&](int64_t begin, int64_t end) {
      if (layout_.rows) {
        loops_.reduce_rows(gradient, x_.data(), {layout_.c, begin, end}, center_.data(), sum.data(),
                           with_x.data());
      } else {
        loops_.reduce_planes(gradient, x_.data(), planes(begin, end), center_.data(), sum.data(),
                             with_x.data());
      }
    };
    layout_.rows ? reduce(0, layout_.n) : in_parts(reduce);
    if (keep) gradient.kept = kept.data();
    const BackwardCoefficients k{center_.data(), scale_.data(), shift_.data(), slope_.data()};
    in_parts([&](int64_t begin, int64_t end) {
      if (layout_.rows) {
        loops_.elementwise_rows(gradient, x_.data(), dx.data(), rows(begin, end), k);
      } else {
        loops_.elementwise_planes(gradient, x_.data(), dx.data(), planes(begin, end), k);
      }
    });
    std::vector<double> exact_sum(sum.size()), exact_with_x(sum.size());
    for_all([&](int64_t i, size_t c) {
      const double g = layout_.is_set(gradient.mask, i) ? at(dy_, i) : 0.0;
      exact_sum[c] += g;
      exact_with_x[c] += g * (at(x_, i) - center_[c]);
      expect_near(dx.data()[i], (g - shift_[c]) * scale_[c] + (at(x_, i) - center_[c]) * slope_[c]);
      if (relu && keep) {
        EXPECT_EQ(static_cast<double>(kept.data()[i]), g) << i;
      }
    });
    const double many = static_cast<double>(layout_.n * layout_.s) + 100;
    for (size_t c = 0; c < sum.size(); ++c) {
      EXPECT_NEAR(sum[c], exact_sum[c], kTolerance * many);
      EXPECT_NEAR(with_x[c], exact_with_x[c], 20 * kTolerance * many);
    }
    dx.expect_guards();
    kept.expect_guards();
  }

 private:
  static constexpr double kTolerance = std::is_same_v<T, float> ? 2e-6 : 1e-13;

  double random() { return std::normal_distribution<double>()(random_); }
  std::vector<T> randoms(double mean) {
    std::vector<T> values(static_cast<size_t>(layout_.count()));
    for (T& value : values) value = static_cast<T>(random() + mean);
    return values;
  }
  static double at(const std::vector<T>& values, int64_t i) {
    return static_cast<double>(values[static_cast<size_t>(i)]);
  }
  static void expect_near(T actual, double expected) {
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual));
    } else {
      EXPECT_NEAR(static_cast<double>(actual), expected, kTolerance * (std::abs(expected) + 20));
    }
  }
  template <class Run>
  void for_all(Run run) {
    for (int64_t i = 0; i < layout_.count(); ++i) run(i, layout_.channel(i));
  }
  /// All rows, or all channels, in two parts.
  template <class Run>
  void in_parts(Run run) {
    const int64_t all = layout_.rows ? layout_.n : layout_.c;
    run(0, all / 3);
    run(all / 3, all);
  }
  Rows rows(int64_t begin, int64_t end) const { return {layout_.c, begin, end, stream_}; }
  Planes planes(int64_t begin, int64_t end) const {
    return {layout_.n, layout_.c, layout_.s, begin, end, stream_};
  }

  const Loops<T>& loops_;
  const Layout layout_;
  const size_t offset_;  ///< elements between a vector's alignment and the results
  const bool stream_;
  std::mt19937 random_{3};
  std::vector<T> x_, dy_, residual_;
  std::vector<double> center_, scale_, shift_, slope_;
};

template <class T>
void expect_right(const Loops<T>& loops) {
  std::vector<Layout> layouts;
  for (const int64_t n : {1, 9, 131}) {
    for (const int64_t c : {1, 3, 4, 7, 8, 13, 16, 21, 40, 70}) layouts.push_back({true, n, c, 1});
  }
  for (const int64_t s : {1, 4, 6, 8, 13, 32, 45, 64, 1023, 1024, 2056, 2500}) {
    layouts.push_back({false, 3, 4, s});
  }
  for (const Layout& layout : layouts) {
    for (const bool aligned : {true, false}) {
      for (const bool stream : {false, true}) {
        SCOPED_TRACE((layout.rows ? "rows " : "planes ") + std::to_string(layout.n) + ", " +
                     std::to_string(layout.c) + ", " + std::to_string(layout.s) +
                     (aligned ? "" : ", not aligned") + (stream ? ", streamed" : ""));
        LoopsCheck<T> check(loops, layout, aligned, stream);
        check.expect_moments();
        for (const bool relu : {false, true}) {
          for (const bool other : {false, true}) {
            check.expect_transform(/*add=*/other, relu);
            check.expect_backward(relu, /*keep=*/other);
          }
        }
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// Despite rounding, the squared deviations of a constant channel must not have a negative sum.
void expect_no_negative_deviation(const Loops<double>& loops) {
  for (int i = 0; i < 500; ++i) {
    const std::vector<double> x(2500, 700 + i / 3.0);
    double mean = 0, m2 = 0;
    loops.moments_planes(x.data(), {1, 1, 2500, 0, 1}, &mean, &m2);
    ASSERT_GE(m2, 0) << x[0];
    loops.moments_rows(x.data(), {1, 0, 2500}, &mean, &m2);
    ASSERT_GE(m2, 0) << x[0];
  }
}

TEST(BatchNormLoopsTest, AreRightOnAnyProcessor) {
  expect_right(baseline::loops<float>());
  expect_right(baseline::loops<double>());
  expect_no_negative_deviation(baseline::loops<double>());
}

#ifdef SYNCBN_HAVE_AVX2
TEST(BatchNormLoopsTest, AreRightWithAvx2) {
  SYNCBN_SKIP_UNLESS(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "avx2");
  expect_right(avx2::loops<float>());
  expect_right(avx2::loops<double>());
  expect_no_negative_deviation(avx2::loops<double>());
}
#endif

}  // namespace
}  // namespace syncbn::dist::detail::cpu

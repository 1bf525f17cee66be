// The CUDA kernels of batch norm, run by the emulator, against plain loops in double.

#include "cuda_emulator/batch_norm_kernels.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/walk.cuh"

namespace syncbn::dist::detail::cuda {
namespace {

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr ValueType kType = ValueType::kFloat;
  static constexpr double kRounding = 6e-8;
};
template <>
struct TypeOf<double> {
  static constexpr ValueType kType = ValueType::kDouble;
  static constexpr double kRounding = 1.2e-16;
};
template <>
struct TypeOf<__half> {
  static constexpr ValueType kType = ValueType::kHalf;
  static constexpr double kRounding = 5e-4;
};
template <>
struct TypeOf<__nv_bfloat16> {
  static constexpr ValueType kType = ValueType::kBFloat16;
  static constexpr double kRounding = 4e-3;
};

using Doubles = std::vector<double>;
/// The type of the reference: more precise than double.
using Exact = long double;
using Exacts = std::vector<Exact>;

size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

template <class T>
T rounded(double value) {
  return narrow<T>(static_cast<Wide<T>>(value));
}

/// Ends exactly after the last value, so that a sanitizer sees an access beyond it.
template <class T>
struct Buffer {
  explicit Buffer(int64_t count, double value = std::numeric_limits<double>::quiet_NaN())
      : values(at(count), rounded<T>(value)) {}
  std::vector<T> values;
};

struct KernelCase {
  bool rows = true;
  int64_t c = 20, s = 1;
  std::vector<int64_t> shares = {37};  ///< samples (planes) or rows of each rank
  double mean = 0, deviation = 1;
  double eps = 1e-5;
  bool residual = false, relu = false, cumulative = false;
  bool constant_channel = false;
  bool sorted = false;  ///< values of a rank ascend, so the mean of a thread's values moves
  int64_t blocks = 8;   ///< that a launch aims for
  uint64_t seed = 0;    ///< of values and of schedules
};

/// Statistics over all ranks, per channel.
struct Statistics {
  Exacts mean, m2, sum_dy, sum_dy_xmu;
  double count = 0;
};

void expect_within(Exact value, Exact exact, Exact bound) {
  EXPECT_LE(std::abs(value - exact), bound) << value << " for " << exact;
}

template <class T>
class KernelCheck {
 public:
  explicit KernelCheck(const KernelCase& c) : case_(c), random_(c.seed) {
    std::normal_distribution<double> normal;
    for (const int64_t share : c.shares) {
      Rank rank;
      rank.n = share;
      const int64_t count = share * c.c * c.s;
      for (int64_t i = 0; i < count; ++i) {
        const bool constant = c.constant_channel && channel(i) == 0;
        rank.x.push_back(rounded<T>(constant ? 3.7 : c.mean + c.deviation * normal(random_)));
        rank.dy.push_back(rounded<T>(normal(random_)));
        rank.residual.push_back(rounded<T>(normal(random_)));
      }
      if (c.sorted) {
        std::sort(rank.x.begin(), rank.x.end(),
                  [](const T& a, const T& b) { return widen(a) < widen(b); });
      }
      rank.y.assign(at(count), rounded<T>(-7));
      rank.dx = rank.kept = rank.y;
      const int64_t run = c.rows ? c.c : c.s;
      if (run > 0) rank.mask.assign(at(count / run * packs_of(run)), 0xCD);
      ranks_.push_back(std::move(rank));
    }
    for (int64_t i = 0; i < c.c; ++i) {
      weight_.push_back(static_cast<float>(normal(random_) + 2));
      bias_.push_back(static_cast<float>(normal(random_)));
    }
  }

  void run() {
    moments();
    exact_statistics();
    for (Rank& rank : ranks_) forward(rank);
    exact_sums();
    for (Rank& rank : ranks_) reduce(rank);
    Doubles sums(at(2 * case_.c)), rows;
    for (const Rank& rank : ranks_) {
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += rank.sums[i];
      rows.insert(rows.end(), rank.sums.begin(), rank.sums.end());
    }
    if (exact_.count > 0) expect_sums(sums);
    for (Rank& rank : ranks_) elementwise(rank, rows);
  }

 private:
  struct Rank {
    int64_t n = 0;
    std::vector<T> x, dy, residual, y, dx, kept;
    std::vector<uint8_t> mask;
    Doubles merged, invstd, sums;
  };

  int64_t channel(int64_t i) const { return case_.rows ? i % case_.c : i / case_.s % case_.c; }

  LaunchShape shape(const Rank& rank) {
    Layout layout{case_.rows, rank.n, case_.c, case_.s, false};
    layout.aligned =
        packs_are_aligned(layout, {rank.x.data(), rank.y.data(), rank.dy.data(),
                                   rank.residual.data(), rank.dx.data(), rank.kept.data()});
    const int slices = layout.slices(case_.blocks);
    return {layout, layout.columns(), slices, tickets_.data()};
  }
  Schedule schedule() { return {.seed = random_()}; }

  void expect_tickets_are_back() {
    for (const unsigned ticket : tickets_) ASSERT_EQ(ticket, 0u);
  }

  void moments() {
    rows_.assign(ranks_.size() * at(stride()), std::numeric_limits<double>::quiet_NaN());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      MomentsArguments arguments{.shape = shape(ranks_[i]), .input = ranks_[i].x.data()};
      std::vector<Moments> partials(at(arguments.shape.slices * case_.c));
      arguments.row = rows_.data() + i * at(stride());
      arguments.partials = partials.data();
      emulate(arguments, TypeOf<T>::kType, schedule());
      expect_tickets_are_back();
    }
  }

  int64_t stride() const { return 2 * case_.c + 4; }

  void exact_statistics() {
    exact_.mean.assign(at(case_.c), 0);
    exact_.m2 = exact_.mean;
    for (const Rank& rank : ranks_) exact_.count += static_cast<double>(rank.n * case_.s);
    for_all([&](const Rank& rank, size_t i, size_t c) {
      exact_.mean[c] += Exact(widen(rank.x[i])) / exact_.count;
    });
    for_all([&](const Rank& rank, size_t i, size_t c) {
      exact_.m2[c] += std::pow(Exact(widen(rank.x[i])) - exact_.mean[c], 2);
    });
  }

  Exact invstd(size_t c) const {
    return 1 / std::sqrt(exact_.m2[c] / std::max(exact_.count, 1.0) + case_.eps);
  }

  /// Upper bound on the error of normalised deviations that comes from rounding the mean to double.
  Exact of_mean(size_t c) const { return kDouble * std::abs(exact_.mean[c]) * invstd(c); }

  template <class Use>
  void for_all(Use use) const {
    for (const Rank& rank : ranks_) {
      for (size_t i = 0; i < rank.x.size(); ++i) {
        use(rank, i, at(channel(static_cast<int64_t>(i))));
      }
    }
  }

  void forward(Rank& rank) {
    std::vector<float> running_mean(at(case_.c), 0.5F);
    std::vector<__half> running_var(at(2 * case_.c), rounded<__half>(2));
    int64_t batches = 3;
    rank.merged.assign(at(2 * case_.c + 1), -7);
    rank.invstd.assign(at(case_.c), -7);
    ForwardArguments arguments{.shape = shape(rank),
                               .merge = {case_.c, rows_.data(), static_cast<int64_t>(ranks_.size()),
                                         stride(), rank.merged.data()},
                               .input = rank.x.data(),
                               .residual = case_.residual ? rank.residual.data() : nullptr,
                               .output = rank.y.data(),
                               .relu_mask = case_.relu ? rank.mask.data() : nullptr,
                               .invstd = rank.invstd.data(),
                               .weight = {weight_.data()},
                               .bias = {bias_.data()},
                               .eps = case_.eps,
                               .running_mean = {running_mean.data()},
                               .running_var = {running_var.data(), ValueType::kHalf, 2},
                               .num_batches_tracked = {&batches, ValueType::kLong},
                               .momentum = 0.1,
                               .cumulative = case_.cumulative};
    emulate(arguments, TypeOf<T>::kType, schedule());
    expect_tickets_are_back();
    EXPECT_EQ(rank.merged.back(), exact_.count);
    const bool updates = exact_.count > 1;
    EXPECT_EQ(batches, updates ? 4 : 3);
    const double momentum = !updates ? 0 : case_.cumulative ? 0.25 : 0.1;
    for (size_t c = 0; c < at(case_.c); ++c) {
      SCOPED_TRACE("channel " + std::to_string(c));
      const Exact deviation = std::sqrt(exact_.m2[c] / std::max(exact_.count, 1.0));
      const Exact relative = kStatistics + of_mean(c);
      expect_within(rank.merged[c], exact_.mean[c],
                    kStatistics * deviation + kDouble * std::abs(exact_.mean[c]));
      expect_within(rank.merged[at(case_.c) + c], exact_.m2[c], relative * exact_.m2[c]);
      expect_within(rank.invstd[c], invstd(c), relative * invstd(c));
      const Exact mean = (1 - momentum) * 0.5 + momentum * exact_.mean[c];
      expect_within(running_mean[c], mean, 1e-6 * (1 + std::abs(mean)));
      const Exact var =
          (1 - momentum) * 2 + (updates ? momentum * exact_.m2[c] / (exact_.count - 1) : 0);
      expect_within(widen(running_var[2 * c]), var, 1e-3 * var);
      EXPECT_EQ(widen(running_var[2 * c + 1]), 2) << "between the strides";
    }
    expect_output(rank);
  }

  void expect_output(const Rank& rank) const {
    Exacts exact;
    for (size_t i = 0; i < rank.x.size(); ++i) {
      const size_t c = at(channel(static_cast<int64_t>(i)));
      Exact value = (Exact(widen(rank.x[i])) - exact_.mean[c]) * invstd(c) * Exact(weight_[c]) +
                    Exact(bias_[c]);
      if (case_.residual) value += Exact(widen(rank.residual[i]));
      exact.push_back(case_.relu ? std::max(value, Exact(0)) : value);
    }
    expect_near(rank.y, exact, 0, "output");
    if (!case_.relu) return;
    for (size_t i = 0; i < rank.y.size(); ++i) {
      // A tiny positive value may round to 0 in the output's type.
      if (widen(rank.y[i]) > 0) {
        ASSERT_TRUE(passes(rank, i)) << i;
      } else {
        ASSERT_TRUE(!passes(rank, i) || exact[i] > -kFloat) << i;
      }
    }
  }

  bool passes(const Rank& rank, size_t i) const {
    if (!case_.relu) return true;
    const size_t run = at(case_.rows ? case_.c : case_.s);
    const size_t byte = i / run * at(packs_of(static_cast<int64_t>(run))) + i % run / kPack;
    return (rank.mask[byte] >> (i % run % kPack) & 1) != 0;
  }
  Exact gradient(const Rank& rank, size_t i) const {
    return passes(rank, i) ? Exact(widen(rank.dy[i])) : 0;
  }

  void exact_sums() {
    exact_.sum_dy.assign(at(case_.c), 0);
    exact_.sum_dy_xmu = exact_.sum_dy;
    for_all([&](const Rank& rank, size_t i, size_t c) {
      exact_.sum_dy[c] += gradient(rank, i);
      exact_.sum_dy_xmu[c] += gradient(rank, i) * (Exact(widen(rank.x[i])) - exact_.mean[c]);
    });
  }

  void reduce(Rank& rank) {
    rank.sums.assign(at(2 * case_.c), -7);
    Doubles before(at(2 * case_.c));
    for (double& value : before) value = std::normal_distribution<double>()(random_);
    Buffer<float> grad_weight(case_.c);
    Buffer<T> grad_bias(case_.c);
    ReduceArguments arguments{.shape = shape(rank),
                              .gradient = rank.dy.data(),
                              .relu_mask = case_.relu ? rank.mask.data() : nullptr,
                              .input = rank.x.data(),
                              .moments = rank.merged.data(),
                              .invstd = rank.invstd.data(),
                              .before = before.data(),
                              .sums = rank.sums.data(),
                              .grad_weight = {grad_weight.values.data()},
                              .grad_bias = {grad_bias.values.data(), TypeOf<T>::kType}};
    std::vector<ChannelSums> partials(at(arguments.shape.slices * case_.c));
    arguments.partials = partials.data();
    emulate(arguments, TypeOf<T>::kType, schedule());
    expect_tickets_are_back();
    for (size_t c = 0; c < at(case_.c); ++c) {
      EXPECT_EQ(grad_weight.values[c],
                static_cast<float>(rank.sums[at(case_.c) + c] * rank.invstd[c]));
      EXPECT_EQ(widen(grad_bias.values[c]), widen(rounded<T>(rank.sums[c])));
    }
    for (size_t i = 0; i < before.size(); ++i) rank.sums[i] -= before[i];
  }

  void expect_sums(const Doubles& sums) const {
    // Sums of absolute values, which do not cancel.
    Exacts dy(at(case_.c)), dy_xmu(at(case_.c));
    for_all([&](const Rank& rank, size_t i, size_t c) {
      dy[c] += std::abs(gradient(rank, i));
      dy_xmu[c] += std::abs(gradient(rank, i) * (Exact(widen(rank.x[i])) - exact_.mean[c]));
    });
    for (size_t c = 0; c < at(case_.c); ++c) {
      const Exact deviation = std::sqrt(exact_.m2[c] / exact_.count);
      expect_within(sums[c], exact_.sum_dy[c], kStatistics * dy[c] + kDouble);
      expect_within(sums[at(case_.c) + c], exact_.sum_dy_xmu[c],
                    kStatistics * (dy_xmu[c] + deviation * dy[c]) +
                        kDouble * (1 + std::abs(exact_.mean[c]) * dy[c]));
    }
  }

  /// @param sums those of all ranks
  void elementwise(Rank& rank, const Doubles& sums) {
    ElementwiseArguments arguments{.shape = shape(rank),
                                   .gradient = rank.dy.data(),
                                   .relu_mask = case_.relu ? rank.mask.data() : nullptr,
                                   .input = rank.x.data(),
                                   .grad_input = rank.dx.data(),
                                   .masked_gradient = case_.residual ? rank.kept.data() : nullptr,
                                   .moments = rank.merged.data(),
                                   .invstd = rank.invstd.data(),
                                   .sums = sums.data(),
                                   .ranks = static_cast<int64_t>(ranks_.size()),
                                   .weight = {weight_.data()}};
    emulate(arguments, TypeOf<T>::kType, schedule());
    Exacts exact;
    Exact least = 0;  // scale of the terms, which may cancel if there are few values
    for (size_t i = 0; i < rank.x.size(); ++i) {
      const size_t c = at(channel(static_cast<int64_t>(i)));
      least = std::max(least, std::abs(gradient(rank, i) * invstd(c) * Exact(weight_[c])));
      const Exact deviation = Exact(widen(rank.x[i])) - exact_.mean[c];
      exact.push_back((gradient(rank, i) - exact_.sum_dy[c] / exact_.count -
                       deviation * invstd(c) * invstd(c) * exact_.sum_dy_xmu[c] / exact_.count) *
                      invstd(c) * Exact(weight_[c]));
      if (!case_.residual) continue;
      ASSERT_EQ(widen(rank.kept[i]), gradient(rank, i)) << i;
    }
    expect_near(rank.dx, exact, least, "gradient of the input");
  }

  /// The bound is relative to the largest value, as in batch_norm_numerics_test.cpp: one rounding
  /// to T and a few in the type of the computation.
  void expect_near(const std::vector<T>& values, const Exacts& exact, Exact most,
                   const char* what) const {
    for (const Exact value : exact) most = std::max(most, std::abs(value));
    Exact rounding = 4 * kFloat;
    for (size_t c = 0; c < at(case_.c); ++c) rounding = std::max(rounding, of_mean(c));
    const Exact bound = most * (TypeOf<T>::kRounding + rounding);
    for (size_t i = 0; i < exact.size(); ++i) {
      ASSERT_LE(std::abs(Exact(widen(values[i])) - exact[i]), bound)
          << what << " " << i << ": " << widen(values[i]) << " for " << exact[i];
    }
  }

  /// Rounding error of the type that the values are computed in.
  static constexpr double kDouble = 1e-15;
  static constexpr double kFloat = sizeof(T) == sizeof(double) ? kDouble : 6e-8;
  /// Error of sums that take 32 values at a time in that type.
  static constexpr double kStatistics = sizeof(T) == sizeof(double) ? 3e-14 : 2e-7;

  const KernelCase case_;
  std::mt19937_64 random_;
  std::vector<Rank> ranks_;
  std::vector<float> weight_, bias_;
  Doubles rows_;
  std::vector<unsigned> tickets_ = std::vector<unsigned>(65);
  Statistics exact_;
};

void expect_accurate(const KernelCase& c) {
  std::string shares;
  for (const int64_t share : c.shares) shares += " " + std::to_string(share);
  SCOPED_TRACE((c.rows ? "rows" + shares + " of " : "samples" + shares + ", channels ") +
               std::to_string(c.c) + ", plane " + std::to_string(c.s) + ", seed " +
               std::to_string(c.seed));
  {
    SCOPED_TRACE("float");
    KernelCheck<float>(c).run();
  }
  {
    SCOPED_TRACE("double");
    KernelCheck<double>(c).run();
  }
  {
    SCOPED_TRACE("half");
    KernelCheck<__half>(c).run();
  }
  {
    SCOPED_TRACE("bfloat16");
    KernelCheck<__nv_bfloat16>(c).run();
  }
}

/// In both layouts, with and without the fused operations.
void expect_accurate_in_all_forms(KernelCase c) {
  for (const bool rows : {true, false}) {
    KernelCase one = c;
    one.rows = rows;
    if (rows) {
      for (int64_t& share : one.shares) share *= c.s;
      one.s = 1;
    }
    for (const bool relu : {false, true}) {
      one.relu = relu;
      one.residual = relu;
      expect_accurate(one);
    }
    one.relu = !(one.residual = true);
    expect_accurate(one);
  }
}

TEST(CudaKernelsTest, SizesWithTails) {
  for (const int64_t c : {1, 3, 8, 9, 64, 70, 130}) {
    for (const int64_t rows : {2, 31, 32, 65, 700}) {
      expect_accurate({.c = c, .shares = {rows}, .residual = c % 2 == 0, .relu = true});
    }
  }
  for (const int64_t s : {1, 7, 8, 15, 49, 64, 300}) {
    for (const int64_t n : {2, 5, 65}) {
      expect_accurate(
          {.rows = false, .c = 3, .s = s, .shares = {n}, .residual = s % 2 == 0, .relu = true});
    }
  }
}

TEST(CudaKernelsTest, SeveralBlocksInAnyOrder) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    expect_accurate({.c = 72, .shares = {2500}, .relu = true, .blocks = 12, .seed = seed});
    expect_accurate({.rows = false,
                     .c = 2,
                     .s = 1600,
                     .shares = {8},
                     .relu = true,
                     .cumulative = true,
                     .blocks = 12,
                     .seed = seed});
  }
}

TEST(CudaKernelsTest, RowsOfSeveralRanks) {
  expect_accurate_in_all_forms({.c = 11, .s = 9, .shares = {3, 0, 1, 4, 2, 0, 7, 5}});
  expect_accurate_in_all_forms({.c = 11, .s = 9, .shares = {0, 6}, .mean = 100});
}

TEST(CudaKernelsTest, OneValuePerChannelHasTheOtherRanksVariance) {
  expect_accurate_in_all_forms({.c = 9, .shares = {1, 1}});
}

TEST(CudaKernelsTest, FewerThanTwoValuesLeaveTheRunningStatistics) {
  expect_accurate_in_all_forms({.c = 9, .shares = {1}});
  expect_accurate_in_all_forms({.c = 9, .shares = {0, 0}});
}

TEST(CudaKernelsTest, LargeMeansTinyDeviationsAndNoEps) {
  // x - mean is exact here; half and bfloat16 have only a few different values in this range.
  for (const double eps : {1e-5, 0.0}) {
    expect_accurate_in_all_forms(
        {.c = 5, .s = 32, .shares = {3, 5}, .mean = 1e3, .deviation = 10, .eps = eps});
    for (const bool rows : {true, false}) {
      const KernelCase c{
          .rows = rows,
          .c = 4,
          .s = rows ? 1 : 1024,
          .shares = rows ? std::vector<int64_t>{3072, 5120} : std::vector<int64_t>{3, 5},
          .mean = 1e3,
          .deviation = 0.1,
          .eps = eps};
      KernelCheck<float>(c).run();
      KernelCheck<double>(c).run();
      KernelCase tiny = c;
      tiny.mean = 1e-3;
      tiny.deviation = 1e-6;
      KernelCheck<float>(tiny).run();
      KernelCheck<double>(tiny).run();
    }
  }
}

TEST(CudaKernelsTest, AThreadOfManyChunks) {
  for (const bool sorted : {false, true}) {
    KernelCase c{.rows = false,
                 .c = 1,
                 .s = 256 * 32 * 60,
                 .shares = {1},
                 .mean = 1e3,
                 .deviation = 0.1,
                 .eps = 0,
                 .sorted = sorted,
                 .blocks = 1};
    KernelCheck<float>(c).run();
    c.mean = 3;
    expect_accurate(c);
  }
}

TEST(CudaKernelsTest, AConstantChannelHasNoVariance) {
  for (const bool rows : {true, false}) {
    const int64_t values = 4 * 33 * 33;
    const std::vector<float> x(at(values), 3.7F);
    Doubles row(3, -7);
    MomentsArguments arguments{
        .shape = {.layout = {rows, rows ? values : 4, 1, rows ? 1 : values / 4, false}},
        .input = x.data(),
        .row = row.data()};
    emulate(arguments, ValueType::kFloat);
    EXPECT_EQ(row, (Doubles{static_cast<double>(3.7F), 0, static_cast<double>(values)}));
  }
}

/// In a checkpoint, the second forward gets the merged row instead of the rows of all ranks.
TEST(CudaKernelsTest, MergingAMergedRowLeavesItsBits) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  const int64_t channels = 37;
  Doubles rows;
  for (int rank = 0; rank < 3; ++rank) {
    for (int64_t i = 0; i < 2 * channels; ++i) rows.push_back(std::abs(normal(random)));
    rows.push_back(3 * rank);
  }
  Doubles merged(at(2 * channels + 1)), again = merged;
  emulate({channels, rows.data(), 3, 2 * channels + 1, merged.data()});
  emulate({channels, merged.data(), 1, 2 * channels + 1, again.data()});
  EXPECT_EQ(again, merged);
  EXPECT_EQ(merged.back(), 9);
}

// Rows with count 0 may hold anything.
TEST(CudaKernelsTest, ARowWithoutValuesIsIgnored) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Doubles rows{nan, nan, 0, 1.5, 4, 2, nan, nan, 0};
  Doubles merged(3);
  emulate({1, rows.data(), 3, 3, merged.data()});
  EXPECT_EQ(merged, (Doubles{1.5, 4, 2}));
}

/// Checks the places of all threads in the blocks of the last tile.
template <bool kRows>
void expect_walk_covers(const Layout& layout, int slices) {
  const LaunchShape shape{layout, layout.columns(), slices, nullptr};
  const int64_t all = layout.n * layout.c * layout.s;
  ASSERT_GT(all, int64_t{1} << 31);
  int64_t packs = 0, end = 0;
  for (int slice = 0; slice < slices; ++slice) {
    for (int thread = 0; thread < layout.threads(); ++thread) {
      Walk<kRows> walk(shape, {layout.tiles() - 1, slice, thread});
      const int64_t left = walk.left();
      packs += left;
      for (int64_t i = 0; i < left; ++i) {
        const Place place = walk.next();
        ASSERT_GE(place.offset, 0);
        ASSERT_GE(place.mask, 0);
        end = std::max(end, place.offset + place.valid);
      }
    }
  }
  EXPECT_EQ(end, all) << "the last tile ends the tensor";
  const int64_t columns = packs_of(layout.c) % layout.columns();
  EXPECT_EQ(packs, kRows ? layout.n * (columns == 0 ? layout.columns() : columns)
                         : layout.n * packs_of(layout.s));
}

TEST(CudaKernelsTest, IndicesGoBeyondTwoToThe31) {
  expect_walk_covers<true>({true, (int64_t{1} << 20) + 3, 2100, 1, false}, 3);
  expect_walk_covers<false>({false, 5, (int64_t{1} << 16) + 1, 7001, false}, 2);
  expect_walk_covers<false>({false, 2, 1001, (int64_t{1} << 21) + 5, false}, 3);
}

/// Zeros that take no memory until they are written.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() { ::munmap(data_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  template <class T>
  T* as() {
    return static_cast<T*>(data_);
  }

 private:
  const size_t bytes_;
  void* const data_;
};

TEST(CudaKernelsTest, TheLastBlockOfMoreThanTwoToThe31ValuesNormalisesTheLastOnes) {
  const Layout layout{true, (int64_t{1} << 20) + 3, 2100, 1, false};
  const int64_t count = layout.n * layout.c;
  SparseMemory x(at(count) * 2), y(at(count) * 2), mask(at(layout.n * packs_of(layout.c)));
  x.as<__nv_bfloat16>()[count - 1] = rounded<__nv_bfloat16>(3);
  const Doubles row = [&] {
    Doubles made(at(2 * layout.c + 1), 1);
    for (int64_t c = 0; c < layout.c; ++c)
      made[at(layout.c + c)] = 4.0 * static_cast<double>(count);
    made.back() = static_cast<double>(count);
    return made;
  }();
  Doubles merged(row.size()), invstd(at(layout.c));
  const int slices = 16385;  // one row a thread
  const ForwardArguments arguments{
      .shape = {layout, layout.columns(), slices, nullptr},
      .merge = {layout.c, row.data(), 1, static_cast<int64_t>(row.size()), merged.data()},
      .input = x.as<void>(),
      .output = y.as<void>(),
      .relu_mask = mask.as<uint8_t>(),
      .invstd = invstd.data(),
      .eps = 0};
  // Row n - 1 is the third of the last slice.
  const uint3 last{static_cast<unsigned>(layout.tiles()) - 1, slices - 1, 0};
  emulate(arguments, ValueType::kBFloat16, {.seed = 0, .only = last});
  EXPECT_EQ(widen(y.as<__nv_bfloat16>()[count - 1]), 1);
  EXPECT_EQ(mask.as<uint8_t>()[layout.n * packs_of(layout.c) - 1], 1 << 3);
}

}  // namespace
}  // namespace syncbn::dist::detail::cuda

#pragma once

// The inner loops of the CPU kernels. Must not include libtorch: the loops are compiled once per
// instruction set, and the linker could pick the AVX2 version of an inline function for all
// callers.

#include <cstdint>

namespace syncbn::dist::detail::cpu {

/// Per-channel coefficients of a fused multiply-add over the input.
/// forward:  y  = (x - center) * scale + shift
/// backward: dx = (dy - offset) * scale + (x - center) * slope
struct ForwardCoefficients {
  const double* center;
  const double* scale;
  const double* shift;
};
struct BackwardCoefficients {
  const double* center;
  const double* scale;
  const double* offset;
  const double* slope;
};

/// Channels [begin, end) of [N, C, S] with contiguous S.
/// stream: results bypass the cache if planes are whole, aligned vectors.
/// prefetch: the caller processes the next channel after this one, so fetch its values.
struct Planes {
  int64_t n, c, s, begin, end;
  bool stream = false;
  bool prefetch = false;
};
/// Rows [begin, end) of [R, C] with contiguous C (channels-last, or 2-D).
struct Rows {
  int64_t c, begin, end;
  bool stream = false;
};

// ReLU mask: one bit per value, from the lowest, set if the ReLU lets the gradient pass. Each
// plane, or row of all channels, begins with a new byte. Null without ReLU.

inline int64_t mask_bytes(int64_t values) {
  return (values + 7) / 8;
}
inline bool mask_bit(const uint8_t* mask, int64_t i) {
  return (mask[i / 8] >> (i % 8) & 1) != 0;
}

/// Operations on the normalised values y: y + residual (may be null), then ReLU, which sets `mask`.
template <class T>
struct EpilogueData {
  const T* residual = nullptr;
  uint8_t* mask = nullptr;
};

/// The gradient of a layer's output. The loops also write the masked gradient to `kept` (may be
/// null).
template <class T>
struct GradientData {
  const T* dy = nullptr;
  const uint8_t* mask = nullptr;
  T* kept = nullptr;
};

/// One table per element type and instruction set. Sums and moments are double for both types.
template <class T>
struct Loops {
  void (*moments_planes)(const T* x, Planes part, double* mean, double* m2);
  /// mean and m2 of the given rows, for all channels.
  void (*moments_rows)(const T* x, Rows part, double* mean, double* m2);
  void (*transform_planes)(const T* x, T* y, Planes part, ForwardCoefficients coefficients,
                           EpilogueData<T> epilogue);
  void (*transform_rows)(const T* x, T* y, Rows part, ForwardCoefficients coefficients,
                         EpilogueData<T> epilogue);
  /// The reductions do not write to `kept`.
  void (*reduce_planes)(GradientData<T> gradient, const T* x, Planes part, const double* mean,
                        double* sum_dy, double* sum_dy_xmu);
  void (*reduce_rows)(GradientData<T> gradient, const T* x, Rows part, const double* mean,
                      double* sum_dy, double* sum_dy_xmu);
  void (*elementwise_planes)(GradientData<T> gradient, const T* x, T* dx, Planes part,
                             BackwardCoefficients coefficients);
  void (*elementwise_rows)(GradientData<T> gradient, const T* x, T* dx, Rows part,
                           BackwardCoefficients coefficients);
};

namespace baseline {
template <class T>
const Loops<T>& loops();
}  // namespace baseline
#ifdef SYNCBN_HAVE_AVX2
namespace avx2 {
template <class T>
const Loops<T>& loops();
}  // namespace avx2
#endif

}  // namespace syncbn::dist::detail::cpu

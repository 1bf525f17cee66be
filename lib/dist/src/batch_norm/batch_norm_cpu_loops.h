#pragma once

// The inner loops of the CPU kernels, free of torch: they are compiled once per instruction set,
// and inline functions of torch's headers compiled for AVX2 must not replace the others.

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

/// The part of a tensor that one call works on. "Planes": [N, C, S] with contiguous S, channels
/// [begin, end). "Rows": [R, C] with contiguous C (channels-last, or 2-D), rows [begin, end).
/// stream: results go past the cache.
struct Planes {
  int64_t n, c, s, begin, end;
  bool stream = false;
};
struct Rows {
  int64_t c, begin, end;
  bool stream = false;
};

/// What follows normalising, in the same pass: y + residual (may be null), then ReLU.
template <class T>
struct EpilogueData {
  const T* residual = nullptr;
  bool relu = false;
};

/// Of a layer with ReLU, what it gave, and where the gradient ahead of the ReLU goes, which the
/// sums are of. Null without.
template <class T>
struct GateData {
  const T* output = nullptr;
  T* gradient = nullptr;
};

/// One table per element type and instruction set. Sums and moments come out in double, whatever
/// the element type.
template <class T>
struct Loops {
  void (*moments_planes)(const T* x, Planes part, double* mean, double* m2);
  /// mean and m2 of the rows given, for all channels.
  void (*moments_rows)(const T* x, Rows part, double* mean, double* m2);
  void (*transform_planes)(const T* x, T* y, Planes part, ForwardCoefficients coefficients,
                           EpilogueData<T> epilogue);
  void (*transform_rows)(const T* x, T* y, Rows part, ForwardCoefficients coefficients,
                         EpilogueData<T> epilogue);
  void (*reduce_planes)(const T* dy, const T* x, Planes part, const double* mean, double* sum_dy,
                        double* sum_dy_xmu, GateData<T> gate);
  void (*reduce_rows)(const T* dy, const T* x, Rows part, const double* mean, double* sum_dy,
                      double* sum_dy_xmu, GateData<T> gate);
  /// dx may be dy.
  void (*elementwise_planes)(const T* dy, const T* x, T* dx, Planes part,
                             BackwardCoefficients coefficients);
  void (*elementwise_rows)(const T* dy, const T* x, T* dx, Rows part,
                           BackwardCoefficients coefficients);
};

namespace baseline {
const Loops<float>& float_loops();
const Loops<double>& double_loops();
}  // namespace baseline
#ifdef SYNCBN_HAVE_AVX2
namespace avx2 {
const Loops<float>& float_loops();
const Loops<double>& double_loops();
}  // namespace avx2
#endif

}  // namespace syncbn::dist::detail::cpu

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
/// stream: results go past the cache, if rows and planes are whole, aligned vectors. ahead: the
/// channel after this one comes next, and what is read and written of it is fetched meanwhile.
struct Planes {
  int64_t n, c, s, begin, end;
  bool stream = false;
  bool ahead = false;
};
struct Rows {
  int64_t c, begin, end;
  bool stream = false;
};

// The gate of a layer with ReLU: one bit a value, from the lowest, set where the gradient of the
// output passes. Each plane, or row of all channels, begins with a byte of its own. Null without
// ReLU.

/// Of so many values next to each other.
inline int64_t gate_bytes(int64_t values) {
  return (values + 7) / 8;
}
/// Of the value with the number i.
inline bool is_open(const uint8_t* gate, int64_t i) {
  return (gate[i / 8] >> (i % 8) & 1) != 0;
}

/// What follows normalising, in the same pass: y + residual (may be null), then ReLU, which sets
/// its gate.
template <class T>
struct EpilogueData {
  const T* residual = nullptr;
  uint8_t* gate = nullptr;
};

/// The gradient of a layer's output. Behind its gate it also goes to `kept` (may be null).
template <class T>
struct GradientData {
  const T* dy = nullptr;
  const uint8_t* gate = nullptr;
  T* kept = nullptr;
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
  /// Nothing is kept yet.
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

#pragma once

#include <cstdint>

namespace syncbn::data {

/// The random numbers of one sample in one epoch, a function of (seed, epoch, sample) alone: they
/// do not depend on threads, ranks or other samples.
///
/// A SplitMix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014): number n is a hash of key + n * golden ratio, the key a hash of (seed, epoch, sample).
class SampleRandom {
 public:
  SampleRandom(int64_t seed, int64_t epoch, int64_t sample);

  uint64_t bits();
  /// In [0, 1), with 53 random bits.
  double uniform();
  /// In [low, high).
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// In [0, bound).
  /// @pre bound >= 1
  int64_t below(int64_t bound);
  bool chance(double probability) { return uniform() < probability; }
  /// Mean 0 and variance 1 (Box and Muller).
  double normal();
  /// From Beta(a, a), a > 0 (two gamma variates: Marsaglia and Tsang, 2000).
  double symmetric_beta(double a);

 private:
  double gamma(double shape);

  uint64_t state_;
};

}  // namespace syncbn::data

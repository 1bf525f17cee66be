#pragma once

#include <cstdint>

namespace syncbn::data {

/// The random numbers of one sample in one epoch: a function of (seed, epoch, sample) and of how
/// many were drawn, never of a thread, a rank or what other samples drew.
///
/// A SplitMix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014), whose n-th number is a hash of key + n * golden ratio; the key is a hash of the three.
class SampleRandom {
 public:
  SampleRandom(int64_t seed, int64_t epoch, int64_t sample);

  uint64_t bits();
  /// In [0, 1), of 53 bits.
  double uniform();
  /// In [low, high).
  double uniform(double low, double high);
  /// In [0, bound); bound must be at least 1.
  int64_t below(int64_t bound);
  bool chance(double probability) { return uniform() < probability; }
  /// Of mean 0 and variance 1 (Box and Muller's).
  double normal();
  /// Of Beta(a, a), a above 0 (from two gamma variates: Marsaglia and Tsang, 2000).
  double symmetric_beta(double a);

 private:
  double gamma(double shape);

  uint64_t state_;
};

}  // namespace syncbn::data

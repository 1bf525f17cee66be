#include <syncbn/data/random.h>

#include <cmath>
#include <numbers>

#include "mix64.h"

namespace syncbn::data {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15ULL;  // times 2^64

}  // namespace

SampleRandom::SampleRandom(int64_t seed, int64_t epoch, int64_t sample)
    : state_(mix64(mix64(mix64(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(epoch)) ^
                   static_cast<uint64_t>(sample))) {}

uint64_t SampleRandom::bits() {
  const uint64_t number = mix64(state_);  // adds the golden ratio itself
  state_ += kGoldenRatio;
  return number;
}

double SampleRandom::uniform() {
  return static_cast<double>(bits() >> 11) * 0x1p-53;
}

int64_t SampleRandom::below(int64_t bound) {
  // Lemire's method without rejection; the bias is below bound / 2^64.
  const auto product = static_cast<Wide>(bits()) * static_cast<uint64_t>(bound);
  return static_cast<int64_t>(product >> 64);
}

double SampleRandom::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

double SampleRandom::symmetric_beta(double a) {
  const double x = gamma(a);
  const double y = gamma(a);
  return x + y > 0 ? x / (x + y) : 0.5;
}

double SampleRandom::gamma(double shape) {
  if (shape < 1) {
    const double boosted = gamma(shape + 1);
    return boosted * std::pow(1 - uniform(), 1 / shape);
  }
  const double d = shape - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  while (true) {
    const double x = normal();
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0) continue;
    if (std::log(1 - uniform()) < x * x / 2 + d - d * v + d * std::log(v)) return d * v;
  }
}

}  // namespace syncbn::data

#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

namespace syncbn::base {

/// The median of at least one number; of two in the middle the lower one.
inline double lower_median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + (std::ssize(numbers) - 1) / 2;
  std::ranges::nth_element(numbers, middle);
  return *middle;
}

/// A rank whose own time is this many times the median's, of two ranks the faster one's, holds up
/// the others.
inline constexpr double kStragglerFactor = 1.3;

}  // namespace syncbn::base

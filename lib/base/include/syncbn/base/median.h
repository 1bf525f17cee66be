#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

namespace syncbn::base {

/// The median of one or more numbers: for an even count, the lower of the two in the middle.
inline double lower_median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + (std::ssize(numbers) - 1) / 2;
  std::ranges::nth_element(numbers, middle);
  return *middle;
}

/// A rank is a straggler if its own time exceeds this multiple of the ranks' lower median.
inline constexpr double kStragglerFactor = 1.3;

}  // namespace syncbn::base

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace syncbn::bench {

/// The upper median if the number of values is even.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace syncbn::bench

#pragma once

#include <cmath>
#include <span>

namespace syncbn::train {

/// The mean of the values that are not NaN; `none` if all are.
inline double mean_of_present(std::span<const double> values, double none) {
  double sum = 0;
  int count = 0;
  for (const double value : values) {
    if (std::isnan(value)) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / count : none;
}

}  // namespace syncbn::train

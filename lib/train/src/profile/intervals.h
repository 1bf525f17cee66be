#pragma once

#include <cstdint>
#include <vector>

namespace syncbn::train {

/// A stretch of time in nanoseconds, without its end.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const Interval&, const Interval&) = default;
};

/// In order and disjoint.
using Intervals = std::vector<Interval>;

/// The times that any of `parts` covers; the parts may overlap, in any order.
Intervals united(Intervals parts);

/// The times that both cover.
Intervals common(const Intervals& a, const Intervals& b);

/// The times in `whole` but not in `taken`.
Intervals without(const Intervals& whole, const Intervals& taken);

int64_t length_of(const Intervals& intervals);

}  // namespace syncbn::train

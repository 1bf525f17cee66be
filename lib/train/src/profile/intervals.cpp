#include "profile/intervals.h"

#include <algorithm>
#include <limits>

namespace syncbn::train {

Intervals united(Intervals parts) {
  std::ranges::sort(parts, {}, &Interval::begin);
  Intervals all;
  for (const Interval& part : parts) {
    if (part.end <= part.begin) continue;
    if (all.empty() || part.begin > all.back().end) {
      all.push_back(part);
    } else {
      all.back().end = std::max(all.back().end, part.end);
    }
  }
  return all;
}

Intervals common(const Intervals& a, const Intervals& b) {
  Intervals both;
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    const Interval part{std::max(a[i].begin, b[k].begin), std::min(a[i].end, b[k].end)};
    if (part.begin < part.end) both.push_back(part);
    a[i].end < b[k].end ? ++i : ++k;
  }
  return both;
}

Intervals without(const Intervals& whole, const Intervals& taken) {
  Intervals gaps;
  int64_t from = std::numeric_limits<int64_t>::min();
  for (const Interval& one : taken) {
    gaps.push_back({from, one.begin});
    from = one.end;
  }
  gaps.push_back({from, std::numeric_limits<int64_t>::max()});
  return common(whole, gaps);
}

int64_t length_of(const Intervals& intervals) {
  int64_t sum = 0;
  for (const Interval& one : intervals) sum += one.end - one.begin;
  return sum;
}

}  // namespace syncbn::train

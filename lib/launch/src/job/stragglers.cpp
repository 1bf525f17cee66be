#include "job/stragglers.h"

#include <fmt/format.h>
#include <syncbn/base/median.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::launch {

std::vector<std::string> StragglerWatch::add(const std::vector<WorkerState>& workers) {
  // With fewer calls, a single pause such as a checkpoint of one rank would decide the comparison.
  constexpr uint64_t kMinCalls = 10;
  // Less is noise, or not worth a line.
  const double min_excess = std::max(0.1, 0.02 * interval_.count());
  struct Interval {
    const WorkerState* worker;
    double own;
    Past* past;
  };
  std::vector<Interval> intervals;
  for (const WorkerState& worker : workers) {
    const auto found = past_.find(worker.rank);
    const Past before = found == past_.end() ? Past{} : found->second;
    Past& past = past_[worker.rank];
    past.own_seconds = worker.own_seconds;
    past.calls = worker.calls;
    if (found == past_.end() || worker.calls < before.calls + kMinCalls) {
      past.slow_intervals = 0;
      continue;
    }
    intervals.push_back({&worker, std::max(0.0, worker.own_seconds - before.own_seconds), &past});
  }
  if (intervals.size() < 2 || intervals.size() < workers.size()) {
    for (auto& [rank, past] : past_) past.slow_intervals = 0;  // slow intervals must be consecutive
    return {};
  }
  std::vector<double> times;
  times.reserve(intervals.size());
  for (const Interval& one : intervals) times.push_back(one.own);
  const double median = base::lower_median(times);
  std::vector<std::string> lines;
  for (const Interval& one : intervals) {
    int& count = one.past->slow_intervals;
    count = one.own > base::kStragglerFactor * median + min_excess ? count + 1 : 0;
    if (count < kIntervals || !named_.insert(one.worker->rank).second) continue;
    lines.push_back(fmt::format(
        "{} is slow, and the others wait for it: it spends {} between collectives, and the median "
        "of the ranks {}",
        one.worker->name(), base::format_seconds(one.own), base::format_seconds(median)));
  }
  return lines;
}

}  // namespace syncbn::launch

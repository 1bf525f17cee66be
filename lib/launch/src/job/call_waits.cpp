#include "job/call_waits.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace syncbn::launch {
namespace {

struct Blocked {
  const WorkerState* waiting = nullptr;
  const WorkerState::Wait* wait = nullptr;
  std::vector<const WorkerState*> by;  ///< ranks that have not called
};

bool is_awaited(const WorkerState& one, const WorkerState::Wait& wait) {
  if (wait.peer >= 0) return one.rank == wait.peer;
  const bool is_member = wait.ranks.empty() || contains(wait.ranks, one.rank);
  if (!is_member || one.called.empty()) return false;  // programs without lib/dist report no calls
  const auto last = one.called.find(wait.group);
  return last == one.called.end() || last->second < wait.sequence;
}

std::optional<Blocked> blocked(const WorkerState& waiting, const std::vector<WorkerState>& all,
                               double min_wait) {
  for (const WorkerState::Wait& wait : waiting.waits) {
    if (wait.seconds < min_wait) continue;
    Blocked result{&waiting, &wait, {}};
    for (const WorkerState& other : all) {
      if (other.rank != waiting.rank && is_awaited(other, wait)) result.by.push_back(&other);
    }
    if (!result.by.empty()) return result;
  }
  return std::nullopt;
}

// Follows the waits from rank to rank until a rank repeats. Names the rank of the circle that most
// others wait for: it may have skipped a call and be waiting in the next one.
std::optional<Culprit> culprit_in_circle(const std::map<int, Blocked>& all) {
  std::vector<const Blocked*> path;
  for (const Blocked* one = &all.begin()->second; std::ranges::count(path, one) == 0;) {
    path.push_back(one);
    const auto next = all.find(one->by.front()->rank);
    if (next == all.end()) return std::nullopt;
    one = &next->second;
  }
  const int entered = path.back()->by.front()->rank;
  while (path.front()->waiting->rank != entered) path.erase(path.begin());
  const auto awaited = [&all](const Blocked* one) {
    return std::ranges::count_if(all, [one](const auto& other) {
      return std::ranges::count(other.second.by, one->waiting) > 0;
    });
  };
  std::rotate(path.begin(), std::ranges::max_element(path, {}, awaited), path.end());
  const WorkerState& first = *path.front()->waiting;
  std::vector<std::string> parts;
  parts.reserve(path.size());
  for (const Blocked* one : path) {
    parts.push_back(fmt::format("rank {} waits in {} for rank {}", one->waiting->rank,
                                one->wait->call, one->by.front()->rank));
  }
  return Culprit{
      .rank = first.rank,
      .host = first.host,
      .why = fmt::format(
          "and {} wait for each other: {}; all ranks must make their "
          "calls of all groups in the same order",
          path.size() == 2 ? "another rank" : fmt::format("{} other ranks", path.size() - 1),
          base::join(parts, ", ")),
      .is_sure = true};
}

}  // namespace

std::optional<Culprit> culprit_by_calls(const std::vector<WorkerState>& workers, double min_wait) {
  std::map<int, Blocked> all;  // by rank
  for (const WorkerState& worker : workers) {
    if (auto one = blocked(worker, workers, min_wait)) all.emplace(worker.rank, std::move(*one));
  }
  if (all.empty()) return std::nullopt;
  std::map<int, std::vector<const Blocked*>> sources;  // by rank, the ranks that wait for it
  for (const auto& [rank, one] : all) {
    for (const WorkerState* by : one.by) {
      if (by->waits.empty()) sources[by->rank].push_back(&one);
    }
  }
  if (sources.empty()) return culprit_in_circle(all);
  const auto& [rank, waiting] = *std::ranges::max_element(
      sources, {}, [](const auto& source) { return source.second.size(); });
  const Blocked& one = *waiting.front();
  const auto culprit = std::ranges::find(workers, rank, &WorkerState::rank);
  const auto others = static_cast<int64_t>(waiting.size()) - 1;
  return Culprit{
      .rank = rank,
      .host = culprit->host,
      .why = fmt::format(
          "has not come to {}, in which rank {}{} waits", one.wait->call, one.waiting->rank,
          others > 0 ? fmt::format(" (and {})", base::counted(others, "other rank")) : ""),
      .is_sure = true};
}

}  // namespace syncbn::launch

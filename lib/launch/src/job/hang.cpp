#include "job/hang.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

namespace syncbn::launch {
namespace {

// The only worker whose main thread is at another place, if there are at least two others and they
// agree; else null.
const WorkerState* outlier(const std::vector<WorkerState>& workers) {
  std::map<std::string, std::vector<const WorkerState*>> places;
  for (const WorkerState& worker : workers) places[worker.place].push_back(&worker);
  if (places.size() != 2 || workers.size() < 3) return nullptr;
  for (const auto& [place, members] : places) {
    if (members.size() == 1) return members[0];
  }
  return nullptr;
}

std::vector<WorkerState> those_that_run(std::vector<WorkerState> workers) {
  std::erase_if(workers, [](const auto& one) { return one.process == "?" || one.process == "Z"; });
  return workers;
}

// Whether `one` is behind `other` by their records. A program may send only one record per second.
bool is_behind(const WorkerState& one, const WorkerState& other) {
  constexpr uint64_t kRecordPeriod = 1'500'000'000;  // ns
  if (!one.reports || !other.reports || one.steps >= other.steps) return false;
  const bool is_same_clock = one.host == other.host;
  return is_same_clock && (one.reported_ns >= other.reported_ns ||
                           other.reported_ns - one.reported_ns > kRecordPeriod);
}

struct Blocked {
  const WorkerState* waiting = nullptr;
  const WorkerState::Wait* wait = nullptr;
  std::vector<const WorkerState*> by;  ///< ranks that have not called
};

bool is_awaited(const WorkerState& one, const WorkerState::Wait& wait) {
  if (wait.peer >= 0) return one.rank == wait.peer;
  // Programs without lib/dist report no calls.
  if (one.called.empty() || !contains(wait.ranks, one.rank)) return false;
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
  std::vector<std::string> parts;
  parts.reserve(path.size());
  for (const Blocked* one : path) {
    parts.push_back(fmt::format("rank {} waits in {} for rank {}", one->waiting->rank,
                                one->wait->call, one->by.front()->rank));
  }
  return Culprit{
      path.front()->waiting->rank,
      fmt::format(
          "and {} wait for each other: {}; all ranks must make their calls of all groups in "
          "the same order",
          path.size() == 2 ? "another rank" : fmt::format("{} other ranks", path.size() - 1),
          base::join(parts, ", "))};
}

// The rank that most others wait for in a call of lib/dist that it has not made. If all awaited
// ranks wait themselves, as when two groups' collectives are called in different orders, one of
// these ranks. Empty if no rank waits, or all have made the call.
// @param min_wait in s; ignores shorter waits, which may have begun after the stall in question.
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
  const int64_t others = std::ssize(waiting) - 1;
  return Culprit{
      rank,
      fmt::format("has not come to {}, in which rank {}{} waits", one.wait->call, one.waiting->rank,
                  others > 0 ? fmt::format(" (and {})", base::counted(others, "other rank")) : "")};
}

}  // namespace

std::optional<Culprit> find_culprit(const std::vector<WorkerState>& workers, double min_wait) {
  if (workers.empty()) return std::nullopt;
  for (const WorkerState& one : workers) {
    if (one.process != "T") continue;
    return Culprit{one.rank,
                   fmt::format("is stopped (SIGSTOP; kill -CONT {} continues it)", one.pid)};
  }
  if (auto one = culprit_by_calls(workers, min_wait)) return one;
  // A rank that waits in a collective is not the culprit, unless its collective is the earliest.
  const auto last = std::ranges::max_element(workers, {}, &WorkerState::collective);
  const auto first = std::ranges::min_element(
      workers, {}, [](const auto& one) { return std::tuple(one.collective, one.steps); });
  if (first->collective < last->collective) {
    const std::string where = first->collective > 0
                                  ? fmt::format("waits in collective {}", first->collective)
                                  : "has not come to it";
    return Culprit{first->rank, fmt::format("{}: rank {} waits in collective {} ({})", where,
                                            last->rank, last->collective, last->doing)};
  }
  for (const WorkerState& one : workers) {
    const auto ahead =
        std::ranges::find_if(workers, [&](const auto& other) { return is_behind(one, other); });
    if (ahead == workers.end() ||
        std::ranges::any_of(workers, [&](const auto& other) { return is_behind(other, one); })) {
      continue;
    }
    return Culprit{one.rank, fmt::format("is at step {}, and rank {} at step {}", one.steps,
                                         ahead->rank, ahead->steps)};
  }
  const WorkerState* const one = outlier(workers);
  if (one == nullptr) return std::nullopt;
  const std::string where = one->place == "running" ? "computing"
                            : one->place.empty()    ? state_name(one->process)
                                                    : "in system call " + one->place;
  return Culprit{one->rank, fmt::format("is {}, unlike all others", where), false};
}

std::optional<Hang> judge_hang(const std::vector<WorkerState>& all, double seconds, bool ends) {
  const std::vector<WorkerState> workers = those_that_run(all);
  const std::string time = base::format_seconds(seconds);
  const auto debugged =
      std::ranges::find_if(workers, [](const auto& one) { return one.tracer != 0; });
  if (debugged != workers.end()) {
    if (!ends) return std::nullopt;
    return Hang{
        .text = fmt::format("no progress for {}, but a debugger (pid {}) is attached to {}: "
                            "--hang_timeout waits for it",
                            time, debugged->tracer, debugged->name()),
        .stops_time = true};
  }
  const auto culprit = find_culprit(workers, seconds / 2);
  if (!culprit) {
    const auto idlest = std::ranges::max_element(workers, {}, &WorkerState::idle_seconds);
    // Without steps, a program may compute for as long as it likes.
    const bool has_steps = idlest != workers.end() && idlest->steps > 0;
    if (!ends || !has_steps) return std::nullopt;
    return Hang{idlest->rank,
                workers.size() == 1
                    ? fmt::format("{} is the only worker that still runs, and makes no progress "
                                  "for {}",
                                  idlest->name(), time)
                    : fmt::format("no rank makes progress for {}, and nothing shows which one "
                                  "holds up the others; ending {}",
                                  time, idlest->name())};
  }
  const WorkerState& worker = *std::ranges::find(workers, culprit->rank, &WorkerState::rank);
  // The rank may be busy, for example with an evaluation that only one rank runs.
  const bool is_busy =
      worker.allowed_seconds > 0 || (worker.reports && worker.idle_seconds < seconds / 2);
  if (is_busy && worker.process != "T") return std::nullopt;
  if (!ends && !culprit->is_sure) return std::nullopt;
  return Hang{ends ? culprit->rank : -1,
              fmt::format("{} {} the others: no progress for {}; it {}", worker.name(),
                          culprit->is_sure ? "holds up" : "probably holds up", time, culprit->why)};
}

}  // namespace syncbn::launch

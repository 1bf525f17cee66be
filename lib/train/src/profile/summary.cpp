#include "profile/summary.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLayers = 10;
constexpr size_t kMaxWaits = 5;
// A straggler costs the others at least this share of a step, and twice what any other rank does:
// ranks that take turns are not stragglers.
constexpr double kStragglerShare = 0.05;
constexpr double kStragglerLead = 2;

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

/// Converts sums over all ranks and steps to means.
class Means {
 public:
  explicit Means(std::span<const RankProfile> profiles) {
    for (const RankProfile& profile : profiles) {
      rank_steps_ += static_cast<double>(profile.steps.size());
    }
  }
  explicit Means(const RankProfile& profile) : Means(std::span(&profile, 1)) {}
  double of_step(int64_t sum) const { return rank_steps_ > 0 ? seconds(sum) / rank_steps_ : 0; }

 private:
  double rank_steps_ = 0;
};

double seconds_of_step(const std::vector<RankProfile>& profiles) {
  int64_t sum = 0;
  for (const RankProfile& profile : profiles) {
    for (const Interval& step : profile.steps) sum += step.end - step.begin;
  }
  return Means(profiles).of_step(sum);
}

Json layers_of(const std::vector<RankProfile>& profiles) {
  std::vector<LayerTime> layers;
  int64_t all = 0;
  for (const RankProfile& profile : profiles) {
    for (const LayerTime& layer : profile.layers) {
      auto sum = std::ranges::find(layers, layer.name, &LayerTime::name);
      if (sum == layers.end()) sum = layers.insert(sum, {.name = layer.name});
      sum->calls += layer.calls;
      sum->forward += layer.forward;
      sum->backward += layer.backward;
      sum->exchange += layer.exchange;
      all += layer.forward + layer.backward;
    }
  }
  std::ranges::stable_sort(layers, std::greater<>(),
                           [](const LayerTime& one) { return one.forward + one.backward; });
  layers.resize(std::min(layers.size(), kMaxLayers));
  const Means means(profiles);
  Json list = Json::array();
  for (const LayerTime& layer : layers) {
    const int64_t both = layer.forward + layer.backward;
    list.push_back({{"name", layer.name},
                    {"forward", means.of_step(layer.forward)},
                    {"backward", means.of_step(layer.backward)},
                    {"exchange", means.of_step(layer.exchange)},
                    {"share", all > 0 ? static_cast<double>(both) / static_cast<double>(all) : 0}});
  }
  return list;
}

/// The time of exchanges of this kind, and the share of it in which ranks had other work.
Json exchange_of(const std::vector<RankProfile>& profiles, Exchange::Kind kind) {
  int64_t whole = 0;
  int64_t open = 0;
  for (const RankProfile& profile : profiles) {
    Intervals times;
    Intervals blocked;
    for (const Exchange& exchange : profile.exchanges) {
      blocked.insert(blocked.end(), exchange.blocked.begin(), exchange.blocked.end());
      if (exchange.kind == kind) times.push_back(exchange.time);
    }
    times = united(std::move(times));
    whole += length_of(times);
    // A backward node that waits in another exchange does not hide this one.
    open += length_of(common(times, united(std::move(blocked))));
  }
  if (whole == 0 || profiles.size() == 1) return nullptr;
  return {{"seconds", Means(profiles).of_step(whole)},
          {"hidden_share", 1 - static_cast<double>(open) / static_cast<double>(whole)}};
}

/// A rank that waits, and the one that it waits for.
using Pair = std::pair<size_t, size_t>;

struct Wait {
  Intervals times;
  std::map<std::string, int64_t> by_exchange;
};

std::map<Pair, Wait> waits_of(const std::vector<RankProfile>& profiles,
                              const std::vector<ClockOffset>& clocks) {
  struct Call {
    size_t rank;
    const Exchange* exchange;
    int64_t begin;  ///< by rank 0's clock
  };
  std::map<std::pair<std::string, uint64_t>, std::vector<Call>> collectives;
  for (size_t rank = 0; rank < profiles.size(); ++rank) {
    for (const Exchange& exchange : profiles[rank].exchanges) {
      collectives[{exchange.group, exchange.sequence}].push_back(
          {rank, &exchange, exchange.time.begin - clocks[rank].offset});
    }
  }
  std::map<Pair, Wait> waits;
  for (const auto& [number, calls] : collectives) {
    const Call& last = *std::ranges::max_element(calls, {}, &Call::begin);
    for (const auto& [rank, exchange, begin] : calls) {
      const int64_t error = clocks[rank].error + clocks[last.rank].error;
      if (rank == last.rank || last.begin - begin <= error) continue;
      const Intervals until{{exchange->time.begin, last.begin + clocks[rank].offset}};
      const Intervals waited = common(exchange->blocked, until);
      if (waited.empty()) continue;
      Wait& wait = waits[{rank, last.rank}];
      wait.times.insert(wait.times.end(), waited.begin(), waited.end());
      wait.by_exchange[exchange->name] += length_of(waited);
    }
  }
  for (auto& [pair, wait] : waits) wait.times = united(std::move(wait.times));
  return waits;
}

/// Time per step of the phase in which the rank did not wait for others.
double own_seconds(const RankProfile& profile, const std::string& phase) {
  Intervals times;
  Intervals blocked;
  for (const Phase& one : profile.phases) {
    if (one.name == phase) times.push_back(one.time);
  }
  for (const Exchange& exchange : profile.exchanges) {
    blocked.insert(blocked.end(), exchange.blocked.begin(), exchange.blocked.end());
  }
  const Intervals own = without(united(std::move(times)), united(std::move(blocked)));
  return Means(profile).of_step(length_of(own));
}

/// The phase in which a rank is slower than the others by the most, and by how much.
std::pair<std::string, double> slowest_phase(const std::vector<RankProfile>& profiles,
                                             size_t rank) {
  std::pair<std::string, double> slowest{"", 0};
  std::set<std::string> phases;
  for (const Phase& phase : profiles[rank].phases) phases.insert(phase.name);
  for (const std::string& phase : phases) {
    double others = 0;
    for (size_t other = 0; other < profiles.size(); ++other) {
      if (other != rank) others += own_seconds(profiles[other], phase);
    }
    const double excess =
        own_seconds(profiles[rank], phase) - others / static_cast<double>(profiles.size() - 1);
    if (excess > slowest.second) slowest = {phase, excess};
  }
  return slowest;
}

Json straggler_of(const std::vector<RankProfile>& profiles, const std::map<Pair, Wait>& waits) {
  if (profiles.size() < 2) return nullptr;
  std::vector<double> costs(profiles.size(), 0);  // to each of the other ranks, per step
  for (const auto& [pair, wait] : waits) {
    costs[pair.second] += Means(profiles[pair.first]).of_step(length_of(wait.times)) /
                          static_cast<double>(profiles.size() - 1);
  }
  const auto rank = static_cast<size_t>(std::ranges::max_element(costs) - costs.begin());
  const double cost = std::exchange(costs[rank], 0);
  const double next = *std::ranges::max_element(costs);
  if (cost < kStragglerShare * seconds_of_step(profiles) || cost < kStragglerLead * next) {
    return nullptr;
  }
  const auto [phase, excess] = slowest_phase(profiles, rank);
  return {{"rank", profiles[rank].rank},
          {"host", profiles[rank].host},
          {"seconds", cost},
          {"phase", phase},
          {"excess", excess}};
}

Json waits_json(const std::vector<RankProfile>& profiles, const std::map<Pair, Wait>& waits) {
  std::vector<Json> list;
  for (const auto& [pair, wait] : waits) {
    const auto mostly =
        std::ranges::max_element(wait.by_exchange, {}, [](const auto& one) { return one.second; });
    list.push_back({{"rank", profiles[pair.first].rank},
                    {"for", profiles[pair.second].rank},
                    {"seconds", Means(profiles[pair.first]).of_step(length_of(wait.times))},
                    {"mostly", mostly->first}});
  }
  std::ranges::stable_sort(list, std::greater<>(),
                           [](const Json& wait) { return wait["seconds"].get<double>(); });
  list.resize(std::min(list.size(), kMaxWaits));
  return list;
}

std::string percent(const Json& share) {
  return fmt::format("{:.1f} %", 100 * share.get<double>());
}

/// With three digits, where base::format_seconds() gives one or two: "1.23 ms".
std::string time_of(const Json& value) {
  const auto time = value.get<double>();
  if (time >= 0.9995) return fmt::format("{:.3g} s", time);
  return time >= 0.9995e-3 ? fmt::format("{:.3g} ms", 1e3 * time)
                           : fmt::format("{:.3g} us", 1e6 * time);
}

std::string exchange_line(const char* what, const Json& exchange, double step) {
  return fmt::format("exchange of {}: {} a step ({:.1f} %), {} of it hidden behind computation",
                     what, time_of(exchange["seconds"]),
                     100 * exchange["seconds"].get<double>() / step,
                     percent(exchange["hidden_share"]));
}

std::string straggler_line(const Json& summary) {
  const Json& straggler = summary["straggler"];
  if (straggler.is_null()) return "straggler: none";
  std::string line =
      fmt::format("straggler: rank {} on {}, for which each other rank waits {} a step",
                  straggler["rank"].get<int64_t>(), straggler["host"].get<std::string>(),
                  time_of(straggler["seconds"]));
  if (const auto phase = straggler["phase"].get<std::string>(); !phase.empty()) {
    line += fmt::format("; its {} takes {} longer", phase, time_of(straggler["excess"]));
  }
  return line;
}

}  // namespace

Json summary_of(const std::vector<RankProfile>& profiles, const std::vector<ClockOffset>& clocks) {
  const std::map<Pair, Wait> waits = waits_of(profiles, clocks);
  int64_t error = 0;
  for (const ClockOffset& clock : clocks) error = std::max(error, clock.error);
  return {{"first_step", profiles[0].first_step},
          {"steps", profiles[0].steps.size()},
          {"ranks", profiles.size()},
          {"step_seconds", seconds_of_step(profiles)},
          {"clock_error_seconds", seconds(error)},
          {"layers", layers_of(profiles)},
          {"gradients", exchange_of(profiles, Exchange::Kind::kGradients)},
          {"statistics", exchange_of(profiles, Exchange::Kind::kStatistics)},
          {"waits", waits_json(profiles, waits)},
          {"straggler", straggler_of(profiles, waits)}};
}

std::vector<std::string> table_of(const Json& summary) {
  const double step = summary["step_seconds"].get<double>();
  const auto ranks = summary["ranks"].get<int64_t>();
  const auto first = summary["first_step"].get<int64_t>();
  const auto steps = summary["steps"].get<int64_t>();
  std::vector<std::string> lines{
      fmt::format("profile of {}: {} a step, mean of {}",
                  steps == 1 ? fmt::format("step {}", first)
                             : fmt::format("steps {} to {}", first, first + steps - 1),
                  time_of(summary["step_seconds"]), base::counted(ranks, "rank"))};
  size_t width = 5;
  for (const Json& layer : summary["layers"]) {
    width = std::max(width, layer["name"].get_ref<const std::string&>().size());
  }
  const auto add_row = [&](const std::string& name, const std::string& forward,
                           const std::string& backward, const std::string& exchange,
                           const std::string& share) {
    lines.push_back(fmt::format("  {:<{}}  {:>9}  {:>9}  {:>9}  {:>6}", name, width, forward,
                                backward, exchange, share));
  };
  add_row("layer", "forward", "backward", "exchange", "share");
  for (const Json& layer : summary["layers"]) {
    add_row(layer["name"].get<std::string>(), time_of(layer["forward"]), time_of(layer["backward"]),
            layer["exchange"].get<double>() > 0 ? time_of(layer["exchange"]) : "",
            percent(layer["share"]));
  }
  if (const Json& gradients = summary["gradients"]; !gradients.is_null()) {
    lines.push_back(exchange_line("gradients", gradients, step));
  }
  if (const Json& statistics = summary["statistics"]; !statistics.is_null()) {
    lines.push_back(exchange_line("batch norm's statistics", statistics, step));
  }
  if (ranks == 1) return lines;
  for (const Json& wait : summary["waits"]) {
    lines.push_back(fmt::format("rank {} waits {} a step for rank {}, mostly in {}",
                                wait["rank"].get<int64_t>(), time_of(wait["seconds"]),
                                wait["for"].get<int64_t>(), wait["mostly"].get<std::string>()));
  }
  lines.push_back(straggler_line(summary));
  if (const Json& error = summary["clock_error_seconds"]; error.get<double>() > 0) {
    lines.push_back(fmt::format("clocks of hosts are aligned to within {}", time_of(error)));
  }
  return lines;
}

}  // namespace syncbn::train

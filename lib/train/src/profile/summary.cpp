#include "profile/summary.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLayers = 10;

/// The mean per step and rank of a sum over all of them, in seconds.
double mean_over_ranks(int64_t sum, const std::vector<RankProfile>& profiles) {
  int64_t rank_steps = 0;
  for (const RankProfile& profile : profiles) rank_steps += profile.steps;
  return rank_steps > 0 ? static_cast<double>(sum) * 1e-9 / static_cast<double>(rank_steps) : 0;
}

Json layers_of(const std::vector<RankProfile>& profiles) {
  std::vector<LayerTime> layers;
  int64_t all = 0;
  for (const RankProfile& profile : profiles) {
    for (const LayerTime& layer : profile.layers) {
      auto sum = std::ranges::find(layers, layer.name, &LayerTime::name);
      if (sum == layers.end()) sum = layers.insert(sum, {.name = layer.name});
      sum->forward += layer.forward;
      sum->backward += layer.backward;
      sum->exchange += layer.exchange;
      all += layer.forward + layer.backward;
    }
  }
  std::ranges::stable_sort(layers, std::greater<>(),
                           [](const LayerTime& one) { return one.forward + one.backward; });
  layers.resize(std::min(layers.size(), kMaxLayers));
  Json list = Json::array();
  for (const LayerTime& layer : layers) {
    const int64_t both = layer.forward + layer.backward;
    list.push_back({{"name", layer.name},
                    {"forward", mean_over_ranks(layer.forward, profiles)},
                    {"backward", mean_over_ranks(layer.backward, profiles)},
                    {"exchange", mean_over_ranks(layer.exchange, profiles)},
                    {"share", all > 0 ? static_cast<double>(both) / static_cast<double>(all) : 0}});
  }
  return list;
}

/// The time of exchanges of a kind, and the share of it in which ranks had other work.
Json exchange_of(const std::vector<RankProfile>& profiles, ExchangeTime RankProfile::*kind) {
  ExchangeTime sum;
  for (const RankProfile& profile : profiles) {
    sum.total += (profile.*kind).total;
    sum.exposed += (profile.*kind).exposed;
  }
  if (sum.total == 0 || profiles.size() == 1) return nullptr;
  return {{"seconds", mean_over_ranks(sum.total, profiles)},
          {"hidden_share", 1 - static_cast<double>(sum.exposed) / static_cast<double>(sum.total)}};
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

}  // namespace

Json summary_of(const std::vector<RankProfile>& profiles) {
  int64_t step_time = 0;
  for (const RankProfile& profile : profiles) step_time += profile.step_time;
  return {{"first_step", profiles[0].first_step},
          {"steps", profiles[0].steps},
          {"ranks", profiles.size()},
          {"step_seconds", mean_over_ranks(step_time, profiles)},
          {"layers", layers_of(profiles)},
          {"gradients", exchange_of(profiles, &RankProfile::gradients)},
          {"statistics", exchange_of(profiles, &RankProfile::statistics)}};
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
  for (const auto& [key, what] :
       {std::pair("gradients", "gradients"), std::pair("statistics", "batch norm's statistics")}) {
    if (!summary[key].is_null()) lines.push_back(exchange_line(what, summary[key], step));
  }
  return lines;
}

}  // namespace syncbn::train

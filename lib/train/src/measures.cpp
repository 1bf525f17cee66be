#include "measures.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "evaluation.h"

namespace syncbn::train {

Measures::Measures(const Config& config, const Task& task, const AddedMetrics& added) {
  const auto none = [](int64_t counts) {
    return std::vector<int64_t>(static_cast<size_t>(counts));
  };
  all_ = task.metrics(none(task.num_counts()), {});
  all_.push_back({.name = "loss", .higher_is_better = false});
  for (Metric& metric : added.metrics(none(added.num_counts()))) {
    if (metric.name.empty()) {
      throw base::UserError("metrics: one has no name; its metric() has to give one");
    }
    // A name is a column of metrics.csv, a key of log.jsonl, and a part of --KEY VALUE.
    const auto is_other = [](unsigned char c) { return std::isspace(c) != 0 || c < ' '; };
    if (std::ranges::any_of(metric.name, is_other)) {
      throw base::UserError(fmt::format(
          "metrics: the name '{}' has a space; its metric() has to give one without, as with '_'",
          base::printable(metric.name)));
    }
    if (std::ranges::count(all_, metric.name, &Metric::name) > 0) {
      throw base::UserError(
          fmt::format("metrics: there are two called '{}'; leave one out", metric.name));
    }
    all_.push_back(std::move(metric));
  }
  if (config.ema.decay > 0) {
    for (Metric average : std::vector(all_)) {
      average.name = kAverage + average.name;
      all_.push_back(std::move(average));
    }
  }
  const KeepBestConfig& keep = config.checkpoint.keep_best;
  if (keep.metric.empty() && !task.has_best()) {
    if (config.early_stop.patience == 0) return;
    throw base::UserError(
        fmt::format("early_stop.patience: no metric of task {} tells which network is the best; "
                    "choose one with checkpoint.keep_best.metric, or set it to 0",
                    config.task.type()));
  }
  const auto found =
      keep.metric.empty() ? all_.begin() : std::ranges::find(all_, keep.metric, &Metric::name);
  if (found == all_.end()) {
    constexpr size_t kShown = 30;
    std::vector<std::string> names;
    for (const Metric& metric : all_) names.push_back(metric.name);
    throw base::UserError(
        fmt::format("checkpoint.keep_best.metric: there is no '{}'; choose from {}", keep.metric,
                    base::join_some(names, ", ", kShown)));
  }
  chosen_ = *found;
  if (keep.mode != "auto") chosen_->higher_is_better = keep.mode == "max";
}

std::string Measures::line_part(const std::string& split, const Results& results) const {
  if (results.empty()) return "";
  std::string text = fmt::format("{} loss {}", split, shown({}, find(results, "loss").value_or(0)));
  const Metric& first = all_.front();
  for (const std::string& prefix : {std::string(), std::string(kAverage)}) {
    const auto value = find(results, prefix + first.name);
    if (value) text += fmt::format(" {}{} {}", prefix, first.name, shown(first, *value));
  }
  return text + "  ";
}

std::string Measures::headline(const std::string& split, const Results& results) const {
  const Metric metric = chosen_.value_or(all_.front());
  const auto value = find(results, metric.name);
  return value ? fmt::format("{} {} {}  ", split, metric.name, shown(metric, *value)) : "";
}

}  // namespace syncbn::train

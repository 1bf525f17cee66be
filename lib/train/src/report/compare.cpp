#include <syncbn/train/report.h>

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/help_lines.h>
#include <syncbn/config/yaml.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "common/config_keys.h"
#include "records/log_record.h"
#include "records/run_files.h"
#include "report/assets.h"
#include "report/page.h"
#include "report/result_table.h"
#include "report/run_records.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Settings = std::map<std::string, std::string>;

constexpr const char* kSeed = "seed";
constexpr const char* kRanks = "world_size";  // not a key, but compared like one
constexpr size_t kMaxKeys = 6;                // in the table for a terminal
constexpr int kMaxCell = 24;                  // columns of a setting, such as a list of transforms
constexpr size_t kMaxEpochs = 300;            // in a run's curves on the page

/// A run to compare.
struct ComparedRun {
  RunRecords records;
  Settings settings;
  Json result;  ///< result.json, or the same keys of a run that has not finished
};

/// What a run would write to result.json if it ended at this point, as far as a comparison needs
/// it.
Json result_so_far(const RunRecords& run) {
  Json result = Json::object();
  if (const auto best = run.best()) {
    result["best_" + best->name] = best->value;
    result["best_mode"] = best->higher_is_better ? "max" : "min";
    result["best_epoch"] = best->epoch;
  }
  for (const NumberTable::Column& column : run.epochs.columns()) {
    const double last = last_number(column.values);
    const bool is_count = column.name == "epoch" || column.name == "step";
    if (!is_count) result[column.name] = std::isnan(last) ? Json(nullptr) : Json(last);
    if (column.name == "epoch") result["epochs"] = static_cast<int64_t>(last);
  }
  if (run.end.contains("seconds")) result["seconds"] = run.end["seconds"];
  if (run.start.contains(kRanks)) result[kRanks] = run.start[kRanks];
  return result;
}

ComparedRun read_compared(const fs::path& folder) {
  ComparedRun run{.records = read_run(folder, ReadSteps::kNo), .settings = {}, .result = {}};
  for (auto& [key, value] : config::flattened(run.records.config)) {
    if (!is_incidental(key)) run.settings[key] = value;
  }
  run.result = run.records.result.is_null() ? result_so_far(run.records) : run.records.result;
  if (run.result.contains(kRanks)) run.settings[kRanks] = run.result[kRanks].dump();
  return run;
}

/// As YAML; empty if the run lacks the key.
std::string setting_of(const ComparedRun& run, const std::string& key) {
  const auto found = run.settings.find(key);
  return found == run.settings.end() ? "" : found->second;
}

/// A folder that is not a run, such as a sweep's, stands for the runs in it.
std::vector<std::string> folders_of_runs(const std::vector<std::string>& given) {
  std::vector<std::string> folders;
  for (const std::string& one : given) {
    std::vector<std::string> inner;
    std::error_code ignored;
    if (!run_files::is_run(one)) {
      for (const auto& entry : fs::directory_iterator(one, ignored)) {
        if (run_files::is_run(entry.path())) inner.push_back(entry.path().string());
      }
    }
    std::ranges::sort(inner);
    if (inner.empty()) inner = {one};
    folders.insert(folders.end(), inner.begin(), inner.end());
  }
  return folders;
}

std::vector<ComparedRun> read_all(const std::vector<std::string>& folders) {
  std::vector<ComparedRun> runs;
  for (const std::string& folder : folders) {
    for (const ComparedRun& other : runs) {
      std::error_code ignored;
      if (!fs::equivalent(folder, other.records.folder, ignored)) continue;
      throw base::UserError(fmt::format("compare: {} is given twice", folder));
    }
    ComparedRun run = read_compared(folder);
    const auto original = std::ranges::find_if(runs, [&](const ComparedRun& other) {
      return !run.records.start.is_null() && other.records.start == run.records.start;
    });
    if (original != runs.end()) {
      spdlog::warn("{} is a copy of {}, and left out", folder, original->records.folder.string());
      continue;
    }
    runs.push_back(std::move(run));
    const std::string first = runs.front().records.setting("task.type");
    const std::string task = runs.back().records.setting("task.type");
    if (task.empty()) {
      throw base::UserError(
          fmt::format("compare: {} does not say what it has trained: it has no {}", folder,
                      run_files::kConfig));
    }
    if (task == first) continue;
    throw base::UserError(
        fmt::format("compare: {} is a run of task {} and {} one of {}; compare runs of one task",
                    folders[0], first, folder, task));
  }
  // Runs in different folders may have the same name.
  std::map<std::string, int> count;
  for (const ComparedRun& run : runs) ++count[run.records.name];
  for (auto& [records, settings, result] : runs) {
    if (count[records.name] > 1) records.name = records.folder.string();
  }
  return runs;
}

/// The keys whose values differ between the runs. First the number of ranks, so that the terminal's
/// table always has it; then the keys that all runs have, the data's last; then those that some
/// runs lack, since another type of data or network brings many of them.
std::vector<std::string> differing_keys(const std::vector<ComparedRun>& runs) {
  Settings all;
  for (const ComparedRun& run : runs) all.insert(run.settings.begin(), run.settings.end());
  std::vector<std::string> keys;
  for (const auto& [key, value] : all) {
    const auto is_other = [&](const ComparedRun& run) { return setting_of(run, key) != value; };
    if (std::ranges::any_of(runs, is_other)) keys.push_back(key);
  }
  const auto place = [&](const std::string& key) {
    if (key == kRanks) return -1;
    const bool is_of_all = std::ranges::all_of(
        runs, [&](const ComparedRun& run) { return run.settings.contains(key); });
    return is_of_all ? (key.starts_with("data.") ? 1 : 0) : 2;
  };
  std::ranges::stable_sort(keys, {}, place);
  return keys;
}

/// Indices of the runs in groups: finished runs that differ only in their seeds share one. Others
/// have no result for a mean.
std::vector<std::vector<size_t>> groups_of(const std::vector<ComparedRun>& runs,
                                           const std::vector<std::string>& keys) {
  std::map<std::vector<std::string>, size_t> places;
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::vector<std::string> alike;
    for (const std::string& key : keys) {
      if (key != kSeed) alike.push_back(setting_of(runs[i], key));
    }
    if (runs[i].records.state() != "finished") alike.push_back(std::to_string(i));
    const auto [place, is_new] = places.emplace(std::move(alike), groups.size());
    if (is_new) groups.emplace_back();
    groups[place->second].push_back(i);
  }
  return groups;
}

/// "0.9812 ± 0.0031", or "98.12 ± 0.31 %" for a share: mean and standard deviation of a sample.
std::string mean_and_spread(const std::string& column, const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double spread = values.size() > 1 ? std::sqrt(squares / (count - 1)) : 0;
  if (column == "seconds") return base::format_seconds(mean);
  if (is_share(column)) return fmt::format("{:.2f} ± {:.2f} %", 100 * mean, 100 * spread);
  return fmt::format("{:.4f} ± {:.4f}", mean, spread);
}

/// Merges the results of several runs: values that differ become text.
Json merged(const std::vector<Json>& results) {
  Json merged = results.front();
  for (auto& [name, value] : merged.items()) {
    std::vector<double> numbers;
    for (const Json& result : results) {
      if (result.contains(name) && result[name].is_number()) numbers.push_back(result[name]);
    }
    if (numbers.size() < results.size() ||
        std::ranges::count(numbers, numbers[0]) == std::ssize(numbers)) {
      continue;
    }
    const auto [low, high] = std::ranges::minmax(numbers);
    const bool is_count = value.is_number_integer();
    value = is_count ? fmt::format("{:.0f} to {:.0f}", low, high) : mean_and_spread(name, numbers);
  }
  return merged;
}

/// Length in bytes of the common beginning of the values of all runs that have this key.
size_t common_begin(const std::vector<ComparedRun>& runs, const std::string& key) {
  std::optional<std::string> common;
  for (const ComparedRun& run : runs) {
    const auto found = run.settings.find(key);
    if (found == run.settings.end()) continue;
    if (!common) common = found->second;
    const auto end = std::ranges::mismatch(*common, found->second).in1;
    common->erase(end, common->end());
  }
  return common.value_or("").size();
}

/// The part of a value that fits into a column, including the place where values differ.
std::string cell_of(const std::string& value, size_t common) {
  if (base::columns_of(value) <= kMaxCell) return value;
  const size_t rest = value.size() - (kMaxCell - 1);
  const size_t begin = base::utf8_prefix(value, std::min(common, rest)).size();
  return base::shortened((begin > 0 ? "…" : "") + value.substr(begin), kMaxCell);
}

/// @param keys that become columns
ResultRow row_of(const std::vector<ComparedRun>& runs, const std::vector<size_t>& group,
                 std::span<const std::string> keys) {
  const RunRecords& first = runs[group[0]].records;
  ResultRow row{.values = {first.name}, .result = {}, .state = first.state()};
  if (group.size() > 1) row.values[0] += fmt::format(" and {} more", group.size() - 1);
  for (const std::string& key : keys) {
    const bool are_several = key == kSeed && group.size() > 1;
    row.values.push_back(are_several
                             ? base::counted(std::ssize(group), kSeed)
                             : cell_of(setting_of(runs[group[0]], key), common_begin(runs, key)));
  }
  std::vector<Json> results;
  double ranks = 0;
  for (const size_t i : group) {
    results.push_back(runs[i].result);
    ranks += rank_of(runs[i].result);
  }
  row.rank = ranks / static_cast<double>(group.size());
  row.result = merged(results);
  return row;
}

Json compared_json(const std::vector<ComparedRun>& runs, const std::vector<std::string>& keys,
                   const std::vector<std::vector<size_t>>& groups) {
  Json all = Json::array();
  for (const auto& group : groups) {
    const ResultRow row = row_of(runs, group, keys);
    Json members = Json::array();
    for (const size_t i : group) {
      const RunRecords& records = runs[i].records;
      members.push_back({{"name", records.name},
                         {"folder", records.folder.string()},
                         {"epochs", records.epochs.thinned(kMaxEpochs).json()}});
    }
    all.push_back({{"values", row.values},
                   {"rank", rounded(row.rank)},
                   {"result", row.result},
                   {"state", row.state},
                   {"runs", members}});
  }
  return {{"task", runs[0].records.setting("task.type")}, {"keys", keys}, {"groups", all}};
}

}  // namespace

int compare_command(const std::vector<std::string>& args) {
  std::vector<std::string> folders;
  std::optional<std::string> html;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg.starts_with("--html=")) {
      html = arg.substr(arg.find('=') + 1);
    } else if (arg == "--html") {
      if (++i == args.size()) throw base::UserError("compare: the option '--html' needs a value");
      html = args[i];
    } else if (arg.starts_with('-')) {
      throw base::UserError(
          fmt::format("compare: {} is not among its options; it takes folders of runs and --html "
                      "FILE",
                      arg));
    } else {
      folders.push_back(arg);
    }
  }
  if (folders.empty()) {
    throw base::UserError("compare: name the folders of runs: train compare runs/a runs/b");
  }
  if (html) check_may_replace(*html);
  const std::vector<ComparedRun> runs = read_all(folders_of_runs(folders));
  const std::vector<std::string> keys = differing_keys(runs);
  const auto groups = groups_of(runs, keys);
  const auto shown = std::span(keys).first(std::min(keys.size(), kMaxKeys));
  std::vector<std::string> names = {"run"};
  names.insert(names.end(), shown.begin(), shown.end());
  std::vector<ResultRow> rows;
  for (const auto& group : groups) rows.push_back(row_of(runs, group, shown));
  winsize size{};
  const bool has_width = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  base::write_stdout(result_table(names, std::move(rows), has_width ? size.ws_col : kAnyColumns));
  if (keys.size() > shown.size()) {
    const std::string others = base::join({keys.begin() + kMaxKeys, keys.end()}, ", ");
    base::write_stdout("also different:\n  " + config::wrapped(others, 2, /*columns=*/80) + "\n");
  }
  if (html) {
    const std::string title = base::counted(std::ssize(runs), "run");
    base::write_file_atomically(*html,
                                page(title, compared_json(runs, keys, groups), assets::kCompareJs));
    base::write_stdout(fmt::format("wrote {}\n", *html));
  }
  return base::kExitOk;
}

}  // namespace syncbn::train

#include "report/run_records.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/median.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>

#include <limits>
#include <string_view>

#include "checkpoints/best_results.h"
#include "records/folder_lock.h"
#include "records/log_record.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// Takes a line about an epoch's step times into account.
void count_slow_epochs(const Json& line, std::vector<int>& epochs) {
  std::vector<double> own;
  for (const Json& time : line.value("own", Json())) {
    own.push_back(time.is_number() ? time.get<double>() : 0);
  }
  if (own.size() != epochs.size()) epochs.assign(own.size(), 0);
  if (own.size() < 2) return;
  const double limit = base::kStragglerFactor * base::lower_median(own);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    epochs[rank] = own[rank] > limit ? epochs[rank] + 1 : 0;
  }
}

void read_line(const Json& line, RunRecords& run) {
  const auto event = field_of<std::string>(line, "event", "");
  if (event == "epoch") run.epochs.add(line);
  if (event == "step") run.steps.add(line);
  if (event == "start") {
    // The step times are of another number of ranks.
    const char* const ranks = "world_size";
    if (field_of<int64_t>(line, ranks, 0) != field_of<int64_t>(run.start, ranks, 0)) {
      run.step_time = nullptr;
      run.slow_epochs.clear();
    }
    run.start = line;
    run.end = nullptr;
  }
  if (event == "step_time") {
    run.step_time = line;
    count_slow_epochs(line, run.slow_epochs);
  }
  if (event == "end") run.end = line;
}

/// The name of a folder that may be given as "." or "runs/x/".
std::string folder_name(const fs::path& folder) {
  const fs::path path = fs::absolute(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

bool is_of_split(std::string_view name) {
  return name.starts_with("val_") || name.starts_with("test_");
}

/// The column that checkpoint.keep_best.metric names; empty if there is none.
std::string chosen_column(const RunRecords& run) {
  const std::string wanted = run.setting("checkpoint.keep_best.metric");
  if (wanted.empty() && run.setting("task.type") == "gan") return "";
  for (const NumberTable::Column& column : run.epochs.columns()) {
    if (!is_of_split(column.name)) continue;
    const std::string metric = column.name.substr(column.name.find('_') + 1);
    if (wanted.empty() ? metric != "loss" : metric == wanted) return column.name;
  }
  return "";
}

}  // namespace

std::string RunRecords::state() const {
  if (!result.is_null()) return "finished";
  if (!end.is_null()) {
    const auto reason = field_of<std::string>(end, "reason", "");
    return reason == "finished" ? reason : "stopped by " + reason;
  }
  return is_locked(folder) ? "running" : "no end";
}

std::string RunRecords::setting(const std::string& path) const {
  const config::Value* const value = config.at(path);
  return value == nullptr ? "" : value->scalar;
}

std::optional<RunRecords::Best> RunRecords::best() const {
  Best best;
  for (const auto& [name, value] : result.items()) {
    if (!name.starts_with("best_") || !is_of_split(name.substr(5))) continue;
    best.name = name.substr(5);
    best.value = field_of(result, name.c_str(), std::numeric_limits<double>::quiet_NaN());
    best.epoch = field_of<int64_t>(result, "best_epoch", 0);
    best.higher_is_better = field_of<std::string>(result, "best_mode", "max") == "max";
    best.last = field_of(result, best.name.c_str(), std::numeric_limits<double>::quiet_NaN());
    return best;
  }
  best.name = chosen_column(*this);
  const std::vector<double>* const values = epochs.find(best.name);
  const std::vector<double>* const numbers = epochs.find("epoch");
  if (values == nullptr || numbers == nullptr) return std::nullopt;
  const std::string mode = setting("checkpoint.keep_best.mode");
  best.higher_is_better = mode == "max" || (mode != "min" && !best.name.ends_with("loss"));
  best.last = last_number(*values);
  const size_t metric = best.name.find('_') + 1;  // after the split
  const std::vector<double>* const losses =
      epochs.find(best.name.substr(0, metric) + loss_beside(best.name.substr(metric)));
  std::vector<Checkpoint::Best> kept;
  for (size_t i = 0; i < values->size(); ++i) {
    Checkpoint::Best result{.value = (*values)[i], .epoch = static_cast<int64_t>((*numbers)[i])};
    if (losses != nullptr) result.loss = (*losses)[i];
    add_result(kept, result, /*count=*/1, best.higher_is_better);
  }
  if (kept.empty()) return std::nullopt;
  best.value = kept.front().value;
  best.epoch = kept.front().epoch;
  return best;
}

RunRecords read_run(const fs::path& folder, ReadSteps steps) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw base::UserError(fmt::format(
        "{} is no folder; name the folder of a run, such as runs/digits", folder.string()));
  }
  if (!run_files::is_run(folder)) {
    throw base::UserError(fmt::format(
        "{} holds no run: there is no log.jsonl, checkpoint or result; name the folder of a run, "
        "such as runs/digits",
        folder.string()));
  }
  RunRecords run;
  run.folder = folder;
  run.name = folder_name(folder);
  RunLog log(folder);
  bool is_empty = true;
  log.read(steps, [&](const Json& line) {
    is_empty = false;
    read_line(line, run);
  });
  if (is_empty) {
    spdlog::warn("{} has no readable line: what is shown is from the other files of the run",
                 (folder / run_files::kLog).string());
  } else if (log.damaged() > 0) {
    spdlog::warn("{}: {} damaged and left out", (folder / run_files::kLog).string(),
                 base::counted(log.damaged(), "line") + (log.damaged() == 1 ? " is" : " are"));
  }
  for (NumberTable* table : {&run.epochs, &run.steps}) table->remove("time");
  check_format(folder, run.start);
  run.result = json_file(folder / run_files::kResult);
  if (const auto text = run_files::config_of(folder)) {
    run.config_text = *text;
    run.config = config::parse_yaml(*text, (folder / run_files::kConfig).string());
  }
  return run;
}

}  // namespace syncbn::train

#include <syncbn/train/report.h>

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "common/config_keys.h"
#include "common/csv.h"
#include "profile/profile_files.h"
#include "records/contact_sheet.h"
#include "records/log_record.h"
#include "records/pictures.h"
#include "records/run_files.h"
#include "report/assets.h"
#include "report/confusion.h"
#include "report/embedded_picture.h"
#include "report/page.h"
#include "report/run_records.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

// Together they keep a page below 3 MB: a number has about 10 bytes, and base64 adds a third.
constexpr size_t kMaxPoints = 2000;  // of a curve
constexpr size_t kMaxNumbers = 60'000;
constexpr size_t kMaxPictures = 16;  // of a name
constexpr size_t kMaxPictureBytes = 120'000;
constexpr size_t kMaxAllPictureBytes = 1'300'000;
constexpr size_t kMaxRanks = 512;  // with 300 bytes each, the environment's included

/// At most kMaxPoints rows, and fewer if there are many columns.
Json curves_of(const NumberTable& table) {
  const size_t columns = std::max<size_t>(1, table.columns().size());
  return table.thinned(std::min(kMaxPoints, kMaxNumbers / columns)).json();
}

/// The classes' names in the rows of confusion.csv, by the keys that stand for them in the log.
std::map<std::string, std::string> names_of_classes(const Rows& rows) {
  std::map<std::string, std::string> names;
  if (rows.empty() || rows[0].front() != "label/answer") return names;
  const std::vector<std::string> all(rows[0].begin() + 1, rows[0].end());
  const std::vector<std::string> keys = class_keys(all);
  for (size_t i = 0; i < all.size(); ++i) names[keys[i]] = all[i];
  return names;
}

/// Moves the results of single classes at the last evaluation out of the table: {"test_iou":
/// {"cat": 0.5}}.
Json take_classes(NumberTable& epochs, const std::map<std::string, std::string>& names) {
  Json classes = Json::object();
  const auto columns = epochs.columns();
  for (const std::string split : {"val_", "test_", "val_ema_", "test_ema_", "train_"}) {
    for (const std::string measure : {"iou", "accuracy", "ap"}) {
      const std::string prefix = split + measure + "_";
      for (const NumberTable::Column& column : columns) {
        if (!column.name.starts_with(prefix)) continue;
        const std::string key = column.name.substr(prefix.size());
        const auto name = names.find(key);
        classes[split + measure][name == names.end() ? key : name->second] =
            rounded(last_number(column.values));
        epochs.remove(column.name);
      }
    }
  }
  return classes;
}

/// The classes that pictures show in colour: [name, CSS color], in the order of their labels.
Json colors_of(const std::string& task, const Json& classes) {
  Json colors = Json::array();
  const bool has_boxes = task == "detection";
  if (classes.empty() || (!has_boxes && task != "segmentation")) return colors;
  int64_t label = 0;
  for (const auto& [name, result] : classes.front().items()) {
    const at::Tensor color = has_boxes ? box_color(label) : mask_color(label);
    const auto* const part = color.const_data_ptr<uint8_t>();
    const bool is_shown = has_boxes || label > 0;  // the background is left as it is
    if (is_shown) colors.push_back({name, fmt::format("rgb({},{},{})", part[0], part[1], part[2])});
    ++label;
  }
  return colors;
}

/// The default of a key; nothing if the key must be set.
std::optional<std::string> default_of(const std::string& path, const RunRecords& run) {
  static const std::vector<config::FieldInfo> fields = config_fields();
  const std::string section = path.substr(0, path.rfind('.') + 1);
  for (const config::FieldInfo& field : fields) {
    if (field.path != path || field.required) continue;
    const bool is_of_type =
        field.only_for.empty() || field.only_for == "type: " + run.setting(section + "type");
    if (!is_of_type) continue;
    return field.default_value.empty() ? R"("")" : field.default_value;
  }
  return std::nullopt;
}

/// Keys that are not at their defaults: [key, value, default or null].
Json settings_of(const RunRecords& run) {
  Json settings = Json::array();
  for (const auto& [path, value] : config::flattened(run.config)) {
    if (is_of_folder(path)) continue;
    const auto by_default = default_of(path, run);
    if (by_default == value) continue;
    settings.push_back({path, value, by_default ? Json(*by_default) : Json(nullptr)});
  }
  return settings;
}

Json pictures_json(const fs::path& folder) {
  const std::vector<PictureFile> files = pictures_of(folder, kMaxPictures);
  const size_t max_bytes =
      std::min(kMaxPictureBytes, kMaxAllPictureBytes / std::max<size_t>(1, files.size()));
  Json pictures = Json::object();
  for (const PictureFile& file : files) {
    try {
      const EmbeddedPicture picture = embedded_picture(file.path, max_bytes);
      pictures[file.name].push_back({{"step", file.step},
                                     {"width", picture.width},
                                     {"height", picture.height},
                                     {"address", picture.address}});
    } catch (const base::Error&) {
      // A file of someone else, too large, or removed meanwhile: the page omits it.
    }
  }
  if (pictures.contains("first_batch") && base::exists(folder / run_files::kFirstBatch)) {
    Json labels = Json::array();
    const auto rows = csv_rows(base::read_file(folder / run_files::kFirstBatch));
    for (size_t i = 1; i < rows.size(); ++i) labels.push_back(rows[i].front());
    Json& picture = pictures["first_batch"][0];
    picture["columns"] = sheet_columns(std::ssize(labels));
    picture["labels"] = labels;
  }
  return pictures;
}

/// A table of numbers by columns, null for an empty field.
Json numbers_json(const fs::path& file) {
  if (!base::exists(file)) return nullptr;
  const auto rows = csv_rows(base::read_file(file));
  Json columns = Json::object();
  for (size_t i = 1; i < rows.size(); ++i) {
    for (size_t k = 0; k < std::min(rows[i].size(), rows[0].size()); ++k) {
      const auto number = base::parse_number<double>(rows[i][k]);
      columns[rows[0][k]].push_back(number ? rounded(*number) : Json(nullptr));
    }
  }
  return columns;
}

/// The worst mistakes of the last evaluation: a sheet of their images, and what was wrong.
Json mistakes_json(const fs::path& folder) {
  if (!base::exists(folder / "mistakes.csv")) return nullptr;
  Json list = Json::array();
  const auto rows = csv_rows(base::read_file(folder / "mistakes.csv"));
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].size() >= 4) list.push_back(rows[i]);
  }
  if (list.empty()) return nullptr;
  Json address;
  try {
    address = embedded_picture(folder / "mistakes.png", kMaxPictureBytes).address;
  } catch (const base::UserError&) {
    // The data has no images.
  }
  return {{"columns", sheet_columns(std::ssize(list))}, {"address", address}, {"list", list}};
}

/// The ranks that hold up the others, with host and GPU.
Json stragglers_of(const RunRecords& run, const Json& environment) {
  constexpr int kEpochs = 3;
  Json stragglers = Json::array();
  if (!environment.contains("hosts")) return stragglers;
  for (const Json& host : environment["hosts"]) {
    if (!host.is_object()) continue;
    for (const Json& one : host.value("ranks", Json())) {
      const auto rank = field_of<int64_t>(one, "rank", -1);
      if (rank < 0 || rank >= std::ssize(run.slow_epochs)) continue;
      const int epochs = run.slow_epochs[static_cast<size_t>(rank)];
      if (epochs < kEpochs) continue;
      const Json device = one.value("device", Json());
      stragglers.push_back({{"rank", rank},
                            {"host", field_of<std::string>(host, "host", "")},
                            {"gpu", field_of<std::string>(device, "address", "")},
                            {"epochs", epochs}});
    }
  }
  return stragglers;
}

/// The times of steps; if there are too many ranks, of those that hold up the others most.
Json of_slowest_ranks(Json times) {
  const Json own = times.is_object() ? times.value("own", Json()) : Json();
  if (!own.is_array() || own.size() <= kMaxRanks) return times;
  std::vector<size_t> ranks(own.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::stable_sort(ranks, std::greater<>(), [&](size_t rank) {
    return own[rank].is_number() ? own[rank].get<double>() : 0;
  });
  ranks.resize(kMaxRanks);
  std::ranges::sort(ranks);
  for (auto& [name, list] : times.items()) {
    if (!list.is_array()) continue;
    Json kept = Json::array();
    for (const size_t rank : ranks) kept.push_back(rank < list.size() ? list[rank] : Json());
    list = std::move(kept);
  }
  times["ranks"] = ranks;
  times["of_ranks"] = own.size();
  return times;
}

/// The environment; if there are too many ranks, with its first hosts only.
Json of_first_hosts(Json environment) {
  if (!environment.contains("hosts") || !environment["hosts"].is_array()) return environment;
  Json kept = Json::array();
  size_t ranks = 0;
  for (const Json& host : environment["hosts"]) {
    ranks += host.is_object() ? host.value("ranks", Json()).size() : 0;
    if (ranks > kMaxRanks && !kept.empty()) break;
    kept.push_back(host);
  }
  const size_t left = environment["hosts"].size() - kept.size();
  if (left > 0) environment["hosts_not_shown"] = left;
  environment["hosts"] = std::move(kept);
  return environment;
}

Json best_of(const RunRecords& run) {
  const auto best = run.best();
  if (!best) return nullptr;
  return {{"name", best->name},
          {"value", rounded(best->value)},
          {"last", rounded(best->last)},
          {"epoch", best->epoch}};
}

}  // namespace

std::string report_page(const fs::path& folder) {
  RunRecords run = read_run(folder, ReadSteps::kYes);
  const Json best = best_of(run);
  const fs::path file = folder / "confusion.csv";
  const Rows confusion = base::exists(file) ? csv_rows(base::read_file(file)) : Rows();
  const Json classes = take_classes(run.epochs, names_of_classes(confusion));
  const Json environment = json_file(folder / "environment.json");
  return page(run.name,
              {{"name", run.name},
               {"folder", fs::absolute(folder).lexically_normal().string()},
               {"state", run.state()},
               {"written", std::floor(unix_time())},
               {"task", run.setting("task.type")},
               {"model", run.setting("model.type")},
               {"data", run.setting("data.type")},
               {"start", run.start},
               {"best", best},
               {"epochs", curves_of(run.epochs)},
               {"steps", curves_of(run.steps)},
               {"step_time", of_slowest_ranks(run.step_time)},
               {"stragglers", stragglers_of(run, environment)},
               {"profile", json_file(ProfileFiles(folder).summary())},
               {"classes", classes},
               {"colors", colors_of(run.setting("task.type"), classes)},
               {"confusion", confusion_json(confusion)},
               {"precision_recall", numbers_json(folder / "precision_recall.csv")},
               {"mistakes", mistakes_json(folder)},
               {"pictures", pictures_json(folder)},
               {"settings", settings_of(run)},
               {"config", run.config_text},
               {"environment", of_first_hosts(environment)},
               {"result", run.result}},
              assets::kReportJs);
}

fs::path write_report(const fs::path& folder) {
  fs::path file = folder / run_files::kReport;
  base::write_file_atomically(file, report_page(folder));
  return file;
}

int report_command(const std::vector<std::string>& args) {
  for (const std::string& arg : args) {
    if (arg.starts_with('-')) {
      throw base::UserError(
          fmt::format("report: unknown option {}; it takes folders of runs", arg));
    }
  }
  if (args.empty()) {
    throw base::UserError("report: name the folder of a run: train report runs/digits");
  }
  for (const std::string& arg : args) {
    base::write_stdout(write_report(arg).string() + "\n");
  }
  return base::kExitOk;
}

}  // namespace syncbn::train

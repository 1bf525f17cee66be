#include "records/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>

#include "common/append_file.h"
#include "profile/profile_files.h"
#include "records/folder_lock.h"
#include "records/log_record.h"
#include "records/run_log.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
// Ordered: keys stay in the order written, for people who read the files.
using Json = nlohmann::ordered_json;

constexpr const char* kLog = "log.jsonl";
constexpr const char* kResult = "result.json";
constexpr const char* kStepPrefix = "step-";
constexpr const char* kBestPrefix = "best-";
constexpr const char* kPictures = "pictures";
constexpr const char* kSuffix = ".pt";
constexpr const char* kFiles[] = {RunFolder::kConfig, kLog, kResult, RunFolder::kLast,
                                  RunFolder::kBest};
constexpr const char* kMetrics = "metrics.csv";
constexpr const char* kEnvironment = "environment.json";
// What a new run removes, but what does not tell that a folder is a run's: names that others use,
// the page, and files about the last evaluation of the built-in tasks.
constexpr const char* kOthers[] = {
    kMetrics,        kEnvironment,           RunFolder::kReport,
    "confusion.csv", "ema_confusion.csv",    "mistakes.csv",
    "mistakes.png",  "precision_recall.csv", "ema_precision_recall.csv",
};
// What the names of files that a run writes begin with, besides kOthers.
constexpr const char* kTemporaries[] = {RunFolder::kConfig, kLog,       kResult, RunFolder::kLast,
                                        RunFolder::kBest,   kBestPrefix};

fs::path numbered(const std::string& name, int number) {
  return fs::path("runs") / fmt::format("{}-{}", name, number);
}

/// Whether the folder has something to lose: a run that failed before its first checkpoint has
/// nothing. A config.yaml that no run wrote is someone's work. A folder that cannot be read counts
/// as empty. The error shows when the run writes to it.
bool holds_run(const fs::path& folder) {
  const auto has = [&](const char* file) { return base::exists(folder / file); };
  return has(kResult) || has(RunFolder::kLast) || has(RunFolder::kBest) || is_locked(folder) ||
         (has(RunFolder::kConfig) && !RunFolder::is_run(folder));
}

/// Whether the folder's log says that this job was the last to start.
bool was_started_by(const fs::path& folder, const std::string& job) {
  std::string last;
  RunLog(folder).read(ReadSteps::kNo, [&](const Json& line) {
    if (field_of<std::string>(line, "event", "") == "start") {
      last = field_of<std::string>(line, "job", "");
    }
  });
  return !job.empty() && last == job;
}

/// Files that a killed run was writing: ".last.pt.PID.tmp".
void remove_temporaries(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const auto is_of = [&](const std::string& file) {
      return name.starts_with("." + file) && name.ends_with(".tmp");
    };
    const bool is_ours =
        std::ranges::any_of(kTemporaries, is_of) || std::ranges::any_of(kOthers, is_of);
    if (is_ours) fs::remove(entry.path(), ignored);
  }
}

/// runs/`name` and its numbered successors that hold a run, the first ones first.
std::vector<fs::path> runs_of(const std::string& name) {
  std::vector<fs::path> found;
  fs::path next = RunFolder::wanted_path("", name);
  for (int number = 2; holds_run(next); ++number) {
    found.push_back(next);
    next = numbered(name, number);
  }
  return found;
}

/// When a run wrote its log last.
fs::file_time_type last_written(const fs::path& run) {
  std::error_code error;
  const auto time = fs::last_write_time(run / kLog, error);
  return error ? fs::file_time_type::min() : time;
}

/// N of a file "PREFIX-N.pt".
std::optional<int64_t> number_of(const fs::path& file, std::string_view prefix) {
  const std::string name = file.filename().string();
  if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) return std::nullopt;
  const std::string digits =
      name.substr(prefix.size(), name.size() - prefix.size() - std::strlen(kSuffix));
  return base::parse_number<int64_t>(digits);
}

/// The files "PREFIX-N.pt" of a folder, the highest N first.
std::vector<fs::path> numbered_files(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    if (number_of(entry.path(), prefix)) found.push_back(entry.path());
  }
  std::ranges::sort(found, std::ranges::greater(),
                    [&](const fs::path& file) { return *number_of(file, prefix); });
  return found;
}

/// What a run would take for its own in a folder that is not a run's.
/// @throws base::UserError if there is such a thing: it is someone's work
void refuse_others_work(const fs::path& folder) {
  std::vector<fs::path> found = {folder / RunFolder::kConfig, folder / kPictures,
                                 ProfileFiles(folder).folder};
  for (const char* file : kOthers) found.push_back(folder / file);
  std::erase_if(found, [](const fs::path& path) { return !base::exists(path); });
  for (const char* prefix : {kStepPrefix, kBestPrefix}) {
    for (fs::path& file : numbered_files(folder, prefix)) found.push_back(std::move(file));
  }
  if (found.empty()) return;
  throw base::UserError(
      fmt::format("run_dir: {} has a {} that no run wrote (there is no {}); choose another folder",
                  folder.string(), found.front().filename().string(), kLog));
}

/// Removes what a run has written to its folder, and nothing else.
void remove_run(const fs::path& folder) {
  std::error_code ignored;
  for (const char* file : kFiles) fs::remove(folder / file, ignored);
  for (const char* file : kOthers) fs::remove(folder / file, ignored);
  for (const char* prefix : {kStepPrefix, kBestPrefix}) {
    for (const fs::path& file : numbered_files(folder, prefix)) fs::remove(file, ignored);
  }
  for (const fs::path& file : EventFile::all_in(folder)) fs::remove(file, ignored);
  const std::string number(12, '?');
  const std::pair<fs::path, std::vector<std::string>> folders[] = {
      {folder / kPictures, {"*-" + number + ".png"}},
      {ProfileFiles(folder).folder, {"trace-*.json.gz", "summary.json", "request"}}};
  for (const auto& [path, patterns] : folders) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path, ignored)) {
      const std::string name = entry.path().filename();
      const auto is_of = [&name](const std::string& pattern) {
        return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
      };
      if (std::ranges::any_of(patterns, is_of)) fs::remove(entry.path(), ignored);
    }
    fs::remove(path, ignored);  // unless others' files are left in it
  }
}

/// No other run writes to the folder while the descriptor is open.
base::UniqueFd lock_of_run(const fs::path& folder) {
  try {
    return lock_folder(folder, "wait for the end of that run, or choose another run_dir");
  } catch (const base::UserError&) {
    // The former attempt of a restarted job has ended. A file server may still hold the lock of a
    // node that it lost.
    if (base::env("SYNCBN_ATTEMPT").value_or("0") == "0") throw;
    return {};
  }
}

std::string json_number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

/// The records of a log.
std::vector<LogRecord> records_of(const std::string& log) {
  std::vector<LogRecord> records;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (auto record = parse_record(line)) records.push_back(*std::move(record));
  }
  return records;
}

}  // namespace

fs::path RunFolder::wanted_path(const std::string& wanted, const std::string& name) {
  return wanted.empty() ? fs::path("runs") / name : fs::path(wanted);
}

fs::path RunFolder::newest(const std::string& wanted, const std::string& name) {
  const fs::path first = wanted_path(wanted, name);
  if (!wanted.empty()) return first;
  const std::vector<fs::path> runs = runs_of(name);
  const auto newest = std::ranges::max_element(runs, {}, last_written);
  return newest == runs.end() ? first : *newest;
}

std::optional<fs::path> RunFolder::of_checkpoint(const fs::path& file, const std::string& wanted,
                                                 const std::string& name) {
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  for (const fs::path& run : wanted.empty() ? runs_of(name) : std::vector<fs::path>{wanted}) {
    std::error_code ignored;
    if (fs::equivalent(folder, run, ignored)) return run;
  }
  return std::nullopt;
}

fs::path RunFolder::choose(const std::string& wanted, const std::string& name, bool resume,
                           bool overwrite) {
  fs::path first = wanted_path(wanted, name);
  if (resume) return newest(wanted, name);
  if (overwrite || !holds_run(first)) return first;
  if (!wanted.empty()) {
    throw base::UserError(
        fmt::format("run_dir: {} already holds a run; choose another folder, resume it "
                    "(--resume auto) or replace it (--overwrite)",
                    first.string()));
  }
  for (int number = 2;; ++number) {
    fs::path next = numbered(name, number);
    if (!holds_run(next)) return next;
  }
}

std::optional<fs::path> RunFolder::of_job(const std::string& id, const std::string& wanted,
                                          const std::string& name) {
  const fs::path first = wanted_path(wanted, name);
  if (was_started_by(first, id)) return first;
  if (!wanted.empty()) return std::nullopt;
  for (int number = 2;; ++number) {
    const fs::path next = numbered(name, number);
    if (was_started_by(next, id)) return next;
    if (!holds_run(next)) return std::nullopt;
  }
}

bool RunFolder::is_run(const fs::path& folder) {
  return std::ranges::any_of(
      kFiles, [&](const char* file) { return file != kConfig && base::exists(folder / file); });
}

bool RunFolder::has_result(const fs::path& folder) {
  return base::exists(result(folder));
}

bool RunFolder::is_unfinished(const fs::path& folder) {
  return !checkpoints(folder).empty() && !has_result(folder) && !is_locked(folder);
}

fs::path RunFolder::result(const fs::path& folder) {
  return folder / kResult;
}

fs::path RunFolder::log(const fs::path& folder) {
  return folder / kLog;
}

fs::path RunFolder::pictures(const fs::path& folder) {
  return folder / kPictures;
}

std::optional<std::string> RunFolder::config_of(const fs::path& folder) {
  if (!base::exists(folder / RunFolder::kConfig)) return std::nullopt;
  return base::read_file(folder / RunFolder::kConfig);
}

RunFolder::RunFolder(fs::path path, const std::string& config, bool resume)
    : path_(std::move(path)),
      config_(config),
      lock_(lock_of_run(path_)),
      metrics_(path_ / kMetrics),
      events_(path_) {
  if (!is_run(path_)) {
    refuse_others_work(path_);
  } else if (!resume) {
    remove_run(path_);
  } else {
    std::error_code ignored;
    fs::remove(path_ / kResult, ignored);  // finished runs only have one
  }
  remove_temporaries(path_);
  open_log();  // first: it tells that the folder is a run's
  base::write_file_atomically(path_ / RunFolder::kConfig, config);
  open_records();
}

RunFolder::~RunFolder() {
  try {
    write_lines();
  } catch (const base::Error&) {
    // The disk is full, and the run ends for another reason, which it reports.
  }
}

void RunFolder::write_picture(const std::string& name, int64_t step, const data::Image& image) {
  const fs::path folder = path_ / kPictures;
  std::error_code ignored;  // writing the file then fails, with a message
  fs::create_directories(folder, ignored);
  const std::string png = data::encode_png(image);
  base::write_file_atomically(folder / fmt::format("{}-{:012}.png", name, step), png);
  events_.add_image(std::string(kPictures) + "/" + name, step, image, png);
}

void RunFolder::log_histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  events_.add_histogram(name, step, histogram);
}

void RunFolder::write_environment(const std::string& text) {
  base::write_file_atomically(path_ / kEnvironment, text);
}

void RunFolder::replace_file(const std::string& name, const std::string& bytes) {
  base::write_file_atomically(path_ / name, bytes);
}

void RunFolder::log_start(int64_t world_size, int64_t step, bool resumed, int64_t total_steps) {
  const Json json = {{"event", "start"},
                     {"time", unix_time()},
                     {kFormatVersionKey, kFormatVersion},
                     {"job", base::env("SYNCBN_JOB_ID").value_or("")},
                     {"world_size", world_size},
                     {"step", step},
                     {"resumed", resumed},
                     {"total_steps", total_steps}};
  append(json.dump());
}

std::optional<double> find(const Results& results, const std::string& name) {
  const auto found = std::ranges::find(results, name, &Results::value_type::first);
  return found == results.end() ? std::nullopt : std::optional(found->second);
}

std::string RunFolder::line_of(const EpochRecord& record) {
  Json json;
  json["event"] = "epoch";
  json["time"] = unix_time();
  json["epoch"] = record.epoch;
  json["step"] = record.step;
  json["lr"] = record.lr;
  for (const auto& [name, value] : record.train) json["train_" + name] = value;
  for (const auto& [name, value] : record.eval) json[record.eval_split + "_" + name] = value;
  json["images_per_second"] = record.images_per_second;
  json["data_wait_seconds"] = record.data_wait_seconds;
  json["data_wait_share"] = record.data_wait_share;
  if (record.memory_bytes > 0) json["memory_bytes"] = record.memory_bytes;
  if (record.gpu) {
    json["gpu_memory_bytes"] = record.gpu->memory_bytes;
    if (record.gpu->utilization) json["gpu_utilization"] = *record.gpu->utilization;
  }
  json["seconds"] = record.seconds;
  return json.dump();
}

EpochRecord RunFolder::parse_line(const std::string& line) {
  const Json json = Json::parse(line);
  // JSON has no NaN: it is written as null.
  const auto number = [](const Json& value) {
    return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
  };
  EpochRecord record{.epoch = json.at("epoch"),
                     .step = json.at("step"),
                     .lr = number(json.at("lr")),
                     .images_per_second = number(json.at("images_per_second")),
                     .data_wait_seconds = number(json.at("data_wait_seconds")),
                     .data_wait_share = number(json.at("data_wait_share")),
                     .memory_bytes = field_of(json, "memory_bytes", 0.0),
                     .seconds = number(json.at("seconds"))};
  if (json.contains("gpu_memory_bytes")) {
    record.gpu = {.memory_bytes = number(json.at("gpu_memory_bytes"))};
    if (json.contains("gpu_utilization")) record.gpu->utilization = json.at("gpu_utilization");
  }
  for (const auto& [key, value] : json.items()) {
    for (const std::string split : {"train", "val", "test"}) {
      if (!key.starts_with(split + "_")) continue;
      (split == "train" ? record.train : record.eval)
          .emplace_back(key.substr(split.size() + 1), number(value));
      if (split != "train") record.eval_split = split;
    }
  }
  return record;
}

std::vector<fs::path> RunFolder::checkpoints(const fs::path& folder) {
  std::vector<fs::path> found = numbered_files(folder, kStepPrefix);
  std::error_code ignored;
  // A symbolic link that leads nowhere, as to a disk that is not there, is not "no checkpoint".
  if (fs::exists(fs::symlink_status(folder / kLast, ignored))) {
    found.insert(found.begin(), folder / kLast);
  }
  return found;
}

void RunFolder::rotate(int64_t step, int64_t keep_last) const {
  if (keep_last > 1) {
    const fs::path kept = path_ / fmt::format("{}{:012}{}", kStepPrefix, step, kSuffix);
    std::error_code error;
    fs::create_hard_link(last(), kept, error);
    // Some file systems have no links. There may be no last.pt then either.
    const bool has_links = !error || error == std::errc::file_exists;
    if (!has_links && base::exists(last())) {
      base::write_file_atomically(kept, base::read_file(last()));
    }
  }
  const std::vector<fs::path> former = numbered_files(path_, kStepPrefix);
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < former.size(); ++i) {
    std::error_code ignored;
    fs::remove(former[i], ignored);
  }
}

void RunFolder::set_aside_after(int64_t step, const fs::path& resumed,
                                const std::vector<std::string>& best) const {
  std::error_code ignored;
  for (const fs::path& file : checkpoints(path_)) {
    const auto number = number_of(file, kStepPrefix);
    const bool is_later = number ? *number > step : !fs::equivalent(file, resumed, ignored);
    if (is_later) fs::rename(file, file.string() + ".abandoned", ignored);
  }
  for (const fs::path& file : numbered_files(path_, kBestPrefix)) {
    const bool is_kept = std::ranges::find(best, file.filename().string()) != best.end();
    if (!is_kept) fs::remove(file, ignored);
  }
}

std::string RunFolder::best_name(int64_t step) {
  return fmt::format("{}{:012}{}", kBestPrefix, step, kSuffix);
}

std::vector<std::string> RunFolder::history(const fs::path& folder) {
  std::vector<fs::path> files = numbered_files(folder, kBestPrefix);
  for (const char* file : {kLog, kBest}) files.push_back(folder / file);
  std::vector<std::string> names;
  for (const fs::path& file : files) {
    if (base::exists(file)) names.push_back(file.filename());
  }
  return names;
}

void RunFolder::log_step(int64_t step, int64_t epoch, double loss, double lr,
                         double data_wait_seconds) {
  constexpr std::chrono::milliseconds kLatest{100};
  const double time = unix_time();
  // Not by Json, which takes longer than all the rest.
  lines_ += fmt::format(
      R"({{"event":"step","time":{},"epoch":{},"step":{},"loss":{},"lr":{},"data_wait_seconds":{}}})",
      json_number(time), epoch, step, json_number(loss), json_number(lr),
      json_number(data_wait_seconds));
  lines_ += '\n';
  add_record({.event = "step",
              .time = time,
              .epoch = epoch,
              .step = step,
              .values = {{"loss", loss}, {"lr", lr}, {"data_wait_seconds", data_wait_seconds}}});
  if (std::chrono::steady_clock::now() - written_ >= kLatest) write_lines();
}

void RunFolder::log_end(const std::string& reason, int64_t step) {
  if (std::exchange(has_ended_, true)) return;
  const Json json = {{"event", "end"}, {"time", unix_time()}, {"reason", reason}, {"step", step}};
  if (reason == "finished") events_.end_session();
  append(json.dump());
}

void RunFolder::log_step_time(int64_t epoch, int64_t step, const std::vector<StepTime>& times) {
  Json json = {{"event", "step_time"}, {"time", unix_time()}, {"epoch", epoch}, {"step", step}};
  const auto add = [&](const char* name, double StepTime::*part) {
    for (const StepTime& rank : times) json[name].push_back(rank.*part);
  };
  add("whole", &StepTime::whole);
  add("data", &StepTime::data);
  add("forward", &StepTime::forward);
  add("exchange", &StepTime::exchange);
  add("backward", &StepTime::backward);
  add("optimizer", &StepTime::optimizer);
  add("own", &StepTime::own);
  add("memory_bytes", &StepTime::memory_bytes);
  lines_ += json.dump() + "\n";
}

void RunFolder::write_result(const ResultRecord& record) {
  const std::string split = record.last.eval_split + "_";
  Json json;
  if (!record.best_metric.empty()) {
    json["best_" + split + record.best_metric] = record.best_value;
    json["best_mode"] = record.higher_is_better ? "max" : "min";
    json["best_epoch"] = record.best_epoch;
  }
  for (const auto& [name, value] : record.last.eval) json[split + name] = value;
  for (const auto& [name, value] : record.last.train) json["train_" + name] = value;
  json["epochs"] = record.last.epoch;
  json["steps"] = record.last.step;
  json["seconds"] = record.last.seconds;
  json["images_per_second"] = record.last.images_per_second;
  json["world_size"] = record.world_size;
  json["seed"] = record.seed;
  json["sync_batchnorm"] = record.sync_batchnorm;
  base::write_file_atomically(path_ / kResult, json.dump(2) + "\n");
}

void RunFolder::append(const std::string& line) {
  lines_ += line + "\n";
  if (const auto record = parse_record(line)) add_record(*record);
  write_lines();
  // Some file systems cannot sync.
  ::fdatasync(log_.get());
}

void RunFolder::write_lines() {
  written_ = std::chrono::steady_clock::now();
  if (lines_.empty()) return;
  restore_removed();
  write_at_once(log_.get(), path_ / kLog, std::exchange(lines_, {}));
  metrics_.write();
  events_.write();
}

void RunFolder::add_record(const LogRecord& record) {
  metrics_.add(record);
  events_.add(record);
}

void RunFolder::rewind_log(int64_t step, int64_t epochs, const std::string& epoch_line) {
  write_lines();
  events_.restart_at(step + 1);
  std::istringstream text(base::read_file(path_ / kLog));
  std::string kept;
  const Json last = epoch_line.empty() ? Json::object() : Json::parse(epoch_line);
  const auto is_last = [&](const Json& line) {
    return field_of<int64_t>(line, "epoch", 0) == field_of<int64_t>(last, "epoch", 0) &&
           field_of<int64_t>(line, "step", 0) == field_of<int64_t>(last, "step", 0);
  };
  bool has_epoch = epoch_line.empty();
  bool is_changed = false;
  for (std::string line; std::getline(text, line);) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    // A full disk may have cut off the last line.
    const bool is_whole = json.is_object();
    const auto event = field_of<std::string>(json, "event", "");
    const bool is_epoch = event == "epoch";
    const bool repeats = ((event == "step" || event == "step_time" || is_epoch) &&
                          field_of<int64_t>(json, "step", 0) > step) ||
                         (is_epoch && field_of<int64_t>(json, "epoch", 0) > epochs);
    if (!is_whole || repeats) {
      is_changed = true;
      continue;
    }
    // Another node's line has times of its own.
    has_epoch = has_epoch || (event == "epoch" && is_last(json));
    kept += line + "\n";
  }
  if (!has_epoch) {
    kept += epoch_line + "\n";
    if (const auto record = parse_record(epoch_line)) events_.add(*record);
  }
  if (has_epoch && !is_changed) return;
  base::write_file_atomically(path_ / kLog, kept);
  open_log();
  metrics_ = MetricsTable(path_ / kMetrics);
  for (const LogRecord& record : records_of(kept)) metrics_.add(record);
}

void RunFolder::open_log() {
  log_ = open_to_append(path_ / kLog);
}

void RunFolder::open_records() {
  const bool has_events = !EventFile::all_in(path_).empty();
  metrics_ = MetricsTable(path_ / kMetrics);
  events_ = EventFile(path_);
  events_.begin_session(config::parse_yaml(config_, kConfig));
  for (const LogRecord& record : records_of(base::read_file(path_ / kLog))) {
    metrics_.add(record);
    if (!has_events) events_.add(record);
  }
}

void RunFolder::restore_removed() {
  struct stat status {};
  if (::fstat(log_.get(), &status) != 0 || status.st_nlink > 0) return;
  spdlog::warn("{} was removed while the run writes to it; a new one begins here",
               (path_ / kLog).string());
  lock_ = lock_of_run(path_);  // the former lock is gone with the folder
  open_log();
  base::write_file_atomically(path_ / kConfig, config_);
  open_records();
}

}  // namespace syncbn::train

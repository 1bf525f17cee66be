#include "records/run_folder.h"

#include <fmt/format.h>
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
#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/append_file.h"
#include "records/folder_lock.h"
#include "records/log_record.h"
#include "records/run_log.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
// Ordered: keys stay in the order written, for people who read the files.
using Json = nlohmann::ordered_json;

std::string json_number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

/// Calls `take` with each line. Never holds the whole log in memory: in a week it grows to hundreds
/// of MB.
void each_line(const fs::path& log, const std::function<void(const std::string&)>& take) {
  std::ifstream lines(log);
  for (std::string line; std::getline(lines, line);) take(line);
  if (!lines.is_open() || lines.bad()) {
    base::throw_file_error(fmt::format("cannot read {}", log.string()), errno);
  }
}

void each_record(const fs::path& log, const std::function<void(const LogRecord&)>& take) {
  each_line(log, [&](const std::string& line) {
    if (const auto record = parse_record(line)) take(*record);
  });
}

/// Whether it has the results of an evaluation.
bool is_evaluated(const LogRecord& record) {
  return std::ranges::any_of(record.values, [](const auto& value) {
    return value.first.starts_with("val_") || value.first.starts_with("test_");
  });
}

/// Whether a file is empty or its last line is complete, so that appended text begins a line.
bool ends_line(const fs::path& file) {
  std::ifstream bytes(file, std::ios::binary);
  return !bytes.seekg(-1, std::ios::end) || bytes.get() == '\n';
}

/// Rewrites the log: the lines that `keeps` marks, then `last` unless it is empty.
void rewrite(const fs::path& log, const std::vector<bool>& keeps, const std::string& last) {
  base::write_file_atomically(log, [&](const fs::path& file) {
    std::ofstream to(file, std::ios::binary);
    size_t number = 0;
    each_line(log, [&](const std::string& line) {
      const bool is_new = number >= keeps.size();  // a note of the launcher
      if (is_new || keeps[number]) to << line << '\n';
      ++number;
    });
    if (!last.empty()) to << last << '\n';
    if (!to.flush()) base::throw_file_error(fmt::format("cannot write {}", log.string()), errno);
  });
}

/// The times as curves of each rank; without curves if the ranks are too many for TensorBoard.
LogRecord by_rank(const Json& times) {
  constexpr size_t kMaxRanks = 64;
  LogRecord record{.event = times["event"],
                   .time = times["time"],
                   .epoch = times["epoch"],
                   .step = times["step"]};
  for (const auto& [name, values] : times.items()) {
    if (!values.is_array() || values.size() > kMaxRanks) continue;
    for (size_t rank = 0; rank < values.size(); ++rank) {
      record.values.emplace_back(fmt::format("{}/{}", name, rank), values[rank]);
    }
  }
  return record;
}

}  // namespace

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

RunFolder::RunFolder(fs::path path, const std::string& config, bool resume,
                     std::optional<base::UniqueFd> lock)
    : path_(std::move(path)),
      config_(config),
      lock_(lock ? *std::move(lock) : lock_of_run(path_)),
      events_(path_) {
  run_files::make_ready(path_, resume);
  open_log();  // first: it marks the folder as a run's
  base::write_file_atomically(path_ / run_files::kConfig, config);
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
  const fs::path folder = path_ / run_files::kPictures;
  std::error_code ignored;  // writing the file then fails, with a message
  fs::create_directories(folder, ignored);
  const std::string png = data::encode_png(image);
  base::write_file_atomically(folder / fmt::format("{}-{:012}.png", name, step), png);
  events_.add_image(std::string(run_files::kPictures) + "/" + name, step, image, png);
}

void RunFolder::log_histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  events_.add_histogram(name, step, histogram);
}

void RunFolder::replace_file(const std::string& name, const std::string& bytes) {
  base::write_file_atomically(path_ / name, bytes);
}

void RunFolder::log_start(int64_t world_size, int64_t step, bool resumed, int64_t total_steps) {
  const Json json = {{"event", "start"},
                     {"time", unix_time()},
                     {kLogVersionKey, kLogVersion},
                     {"job", base::env("SYNCBN_JOB_ID").value_or("")},
                     {"world_size", world_size},
                     {"step", step},
                     {"resumed", resumed},
                     {"total_steps", total_steps}};
  append(json.dump());
}

void RunFolder::log_step(int64_t step, int64_t epoch, double loss, double lr,
                         double data_wait_seconds) {
  constexpr std::chrono::milliseconds kLatest{100};
  const double time = unix_time();
  // Not through Json, which takes longer than everything else here.
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

void RunFolder::log_end(const std::string& reason, int64_t step, std::optional<double> seconds) {
  if (std::exchange(has_ended_, true)) return;
  // JSON is UTF-8; an error may name a file whose name is not.
  Json json = {
      {"event", "end"}, {"time", unix_time()}, {"reason", base::printable(reason)}, {"step", step}};
  if (seconds) json["seconds"] = *seconds;
  if (reason == "finished") events_.end_session();
  append(json.dump());
  if (!metrics_) write_table();
}

bool RunFolder::has_end() {
  write_lines();
  bool has_ended = false;
  RunLog(path_).read(ReadSteps::kNo, [&](const Json& line) {
    const auto event = field_of<std::string>(line, "event", "");
    if (event == "start" || event == "end") has_ended = event == "end";
  });
  return has_ended;
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
  events_.add(by_rank(json));
}

void RunFolder::append(const std::string& line) {
  lines_ += line + "\n";
  const auto record = parse_record(line);
  if (record) add_record(*record);
  write_lines();
  if (record && !metrics_ && is_evaluated(*record)) write_table();
  // Some file systems cannot sync.
  ::fdatasync(log_.get());
}

void RunFolder::write_lines() {
  written_ = std::chrono::steady_clock::now();
  if (lines_.empty()) return;
  restore_removed();
  write_at_once(log_.get(), path_ / run_files::kLog, std::exchange(lines_, {}));
  if (metrics_) metrics_->write();
  events_.write();
}

void RunFolder::add_record(const LogRecord& record) {
  if (metrics_) metrics_->add(record);
  events_.add(record);
}

void RunFolder::write_table(bool needs_evaluation) {
  const fs::path log = path_ / run_files::kLog;
  metrics_.emplace(path_ / run_files::kMetrics);
  bool has_evaluation = false;
  each_record(log, [&](const LogRecord& record) {
    metrics_->add_columns(record);
    has_evaluation = has_evaluation || is_evaluated(record);
  });
  if (needs_evaluation && !has_evaluation) {
    std::error_code ignored;
    fs::remove(path_ / run_files::kMetrics, ignored);
    return metrics_.reset();
  }
  each_record(log, [&](const LogRecord& record) { metrics_->add(record); });
  metrics_->write();
}

void RunFolder::rewind_log(int64_t step, int64_t epochs, const std::string& epoch_line) {
  write_lines();
  events_.restart_at(step + 1);
  const fs::path log = path_ / run_files::kLog;
  std::vector<bool> keeps;
  const Json last = epoch_line.empty() ? Json::object() : Json::parse(epoch_line);
  const auto is_last = [&](const Json& line) {
    return field_of<int64_t>(line, "epoch", 0) == field_of<int64_t>(last, "epoch", 0) &&
           field_of<int64_t>(line, "step", 0) == field_of<int64_t>(last, "step", 0);
  };
  bool has_epoch = epoch_line.empty();
  bool is_changed = !ends_line(log);
  each_line(log, [&](const std::string& line) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    // A full disk may have cut off the last line.
    const bool is_whole = json.is_object();
    const auto event = field_of<std::string>(json, "event", "");
    const bool is_epoch = event == "epoch";
    const bool repeats = ((event == "step" || event == "step_time" || is_epoch) &&
                          field_of<int64_t>(json, "step", 0) > step) ||
                         (is_epoch && field_of<int64_t>(json, "epoch", 0) > epochs);
    keeps.push_back(is_whole && !repeats);
    is_changed = is_changed || !keeps.back();
    // Compared by its numbers: the line of another node has other times.
    has_epoch = has_epoch || (keeps.back() && is_epoch && is_last(json));
  });
  if (has_epoch && !is_changed) return;
  rewrite(log, keeps, has_epoch ? "" : epoch_line);
  if (!has_epoch) {
    if (const auto record = parse_record(epoch_line)) events_.add(*record);
  }
  open_log();
  write_table(/*needs_evaluation=*/true);
}

void RunFolder::open_log() {
  log_ = open_to_append(path_ / run_files::kLog);
}

void RunFolder::open_records() {
  const bool has_events = !EventFile::all_in(path_).empty();
  write_table(/*needs_evaluation=*/true);
  events_ = EventFile(path_);
  events_.begin_session(config::parse_yaml(config_, run_files::kConfig));
  if (has_events) return;
  each_record(path_ / run_files::kLog, [&](const LogRecord& record) { events_.add(record); });
}

void RunFolder::restore_removed() {
  struct stat status {};
  if (::fstat(log_.get(), &status) != 0 || status.st_nlink > 0) return;
  spdlog::warn("{} was removed while the run writes to it; a new one begins here",
               (path_ / run_files::kLog).string());
  lock_.reset();  // its file may be there still
  lock_ = lock_of_run(path_);
  open_log();
  base::write_file_atomically(path_ / run_files::kConfig, config_);
  open_records();
}

}  // namespace syncbn::train

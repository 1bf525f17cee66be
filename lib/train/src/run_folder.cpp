#include "run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
// Ordered: keys stay in the order written, for people who read the files.
using Json = nlohmann::ordered_json;

constexpr const char* kConfig = "config.yaml";
constexpr const char* kLog = "log.jsonl";
constexpr const char* kResult = "result.json";
constexpr const char* kFiles[] = {kConfig, kLog, kResult, RunFolder::kLast, RunFolder::kBest};

fs::path numbered(const std::string& name, int number) {
  return fs::path("runs") / fmt::format("{}-{}", name, number);
}

bool holds_run(const fs::path& folder) {
  return std::ranges::any_of(kFiles, [&](const char* file) {
    // A folder that cannot be read counts as empty. The error shows when the run writes to it.
    std::error_code ignored;
    return fs::exists(folder / file, ignored);
  });
}

/// Whether the folder's log says that this job was the last to start.
bool was_started_by(const fs::path& folder, const std::string& job) {
  std::ifstream log(folder / kLog);
  std::string last;
  for (std::string line; std::getline(log, line);) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.value("event", "") == "start") last = json.value("job", "");
  }
  return !job.empty() && last == job;
}

/// Files that a killed run was writing: ".last.pt.PID.tmp".
void remove_temporaries(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const bool is_ours = std::ranges::any_of(kFiles, [&](const std::string& file) {
      return name.starts_with("." + file + ".") && name.ends_with(".tmp");
    });
    if (is_ours) fs::remove(entry.path(), ignored);
  }
}

double unix_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

fs::path RunFolder::wanted_path(const std::string& wanted, const std::string& name) {
  return wanted.empty() ? fs::path("runs") / name : fs::path(wanted);
}

fs::path RunFolder::newest(const std::string& wanted, const std::string& name) {
  fs::path found = wanted_path(wanted, name);
  if (!wanted.empty()) return found;
  for (int number = 2;; ++number) {
    fs::path next = numbered(name, number);
    if (!holds_run(next)) return found;
    found = std::move(next);
  }
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

bool RunFolder::has_result(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kResult, ignored);
}

RunFolder::RunFolder(fs::path path, const std::string& config, bool resume)
    : path_(std::move(path)) {
  for (const char* file : kFiles) {
    std::error_code ignored;
    // result.json exists for finished runs only.
    if (!resume || file == std::string(kResult)) fs::remove(path_ / file, ignored);
  }
  remove_temporaries(path_);
  base::write_file_atomically(path_ / kConfig, config);
  const fs::path log = path_ / kLog;
  log_.reset(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_DSYNC, 0666));
  if (!log_) base::throw_file_error(fmt::format("cannot open {}", log.string()), errno);
}

void RunFolder::log_start(int64_t world_size, int64_t step, bool resumed) {
  const Json json = {{"event", "start"},
                     {"time", unix_time()},
                     {"job", base::env("SYNCBN_JOB_ID").value_or("")},
                     {"world_size", world_size},
                     {"step", step},
                     {"resumed", resumed}};
  append(json.dump());
}

std::string RunFolder::line_of(const EpochRecord& record) {
  Json json;
  json["event"] = "epoch";
  json["time"] = unix_time();
  json["epoch"] = record.epoch;
  json["step"] = record.step;
  json["lr"] = record.lr;
  json["train_loss"] = record.train_loss;
  if (record.test_loss) json["test_loss"] = *record.test_loss;
  if (record.test_accuracy) json["test_accuracy"] = *record.test_accuracy;
  json["images_per_second"] = record.images_per_second;
  json["data_wait_seconds"] = record.data_wait_seconds;
  json["data_wait_share"] = record.data_wait_share;
  json["seconds"] = record.seconds;
  return json.dump();
}

EpochRecord RunFolder::parse_line(const std::string& line) {
  const Json json = Json::parse(line);
  const auto optional = [&](const char* key) {
    return json.contains(key) ? std::optional<double>(json.at(key)) : std::nullopt;
  };
  return {.epoch = json.at("epoch"),
          .step = json.at("step"),
          .lr = json.at("lr"),
          .train_loss = json.at("train_loss"),
          .test_loss = optional("test_loss"),
          .test_accuracy = optional("test_accuracy"),
          .images_per_second = json.at("images_per_second"),
          .data_wait_seconds = json.at("data_wait_seconds"),
          .data_wait_share = json.at("data_wait_share"),
          .seconds = json.at("seconds")};
}

void RunFolder::log_end(const std::string& reason, int64_t step) {
  const Json json = {{"event", "end"}, {"time", unix_time()}, {"reason", reason}, {"step", step}};
  append(json.dump());
}

void RunFolder::write_result(const ResultRecord& record) {
  const Json json = {{"best_test_accuracy", record.best_test_accuracy},
                     {"best_epoch", record.best_epoch},
                     {"test_accuracy", record.last.test_accuracy.value_or(0)},
                     {"test_loss", record.last.test_loss.value_or(0)},
                     {"train_loss", record.last.train_loss},
                     {"epochs", record.last.epoch},
                     {"steps", record.last.step},
                     {"seconds", record.last.seconds},
                     {"images_per_second", record.last.images_per_second},
                     {"world_size", record.world_size},
                     {"seed", record.seed},
                     {"sync_batchnorm", record.sync_batchnorm}};
  base::write_file_atomically(path_ / kResult, json.dump(2) + "\n");
}

void RunFolder::append(const std::string& line) {
  const std::string whole = line + "\n";
  // A single write: no reader sees part of a line, nor does a crash leave one.
  const ssize_t written = ::write(log_.get(), whole.data(), whole.size());
  if (written == static_cast<ssize_t>(whole.size())) return;
  // A short write means that the disk is full.
  base::throw_file_error(fmt::format("cannot write {}", (path_ / kLog).string()),
                         written < 0 ? errno : ENOSPC);
}

void RunFolder::complete_log(const std::string& line) {
  const std::string text = base::read_file(path_ / kLog);
  // A full disk may have cut off the last line.
  const size_t whole = text.rfind('\n') + 1;
  if (whole < text.size()) fs::resize_file(path_ / kLog, whole);
  if (text.find(line + "\n") == std::string::npos) append(line);
}

}  // namespace syncbn::train

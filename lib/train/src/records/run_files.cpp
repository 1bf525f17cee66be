#include "records/run_files.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "profile/profile_files.h"
#include "records/event_file.h"
#include "records/folder_lock.h"
#include "records/run_log.h"

namespace syncbn::train::run_files {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStepPrefix = "step-";
constexpr const char* kBestPrefix = "best-";
constexpr const char* kSuffix = ".pt";
constexpr const char* kFiles[] = {kConfig, kLog, kResult, kLast, kBest};
// Files that a new run removes but that do not mark a folder as a run's: common names, the page,
// and files about the last evaluation of the built-in tasks.
constexpr const char* kOthers[] = {
    kMetrics,
    kEnvironment,
    kReport,
    kFirstBatch,
    "confusion.csv",
    "ema_confusion.csv",
    "mistakes.csv",
    "mistakes.png",
    "precision_recall.csv",
    "ema_precision_recall.csv",
};

fs::path numbered(const std::string& name, int number) {
  return fs::path("runs") / fmt::format("{}-{}", name, number);
}

/// Whether the folder has something to lose. A run that failed before its first checkpoint has
/// nothing. A config.yaml that no run wrote is the user's work. A folder that cannot be read counts
/// as empty: the error shows when the run writes to it.
bool holds_run(const fs::path& folder) {
  const auto has = [&](const char* file) { return base::exists(folder / file); };
  return has(kResult) || has(kLast) || has(kBest) || is_locked(folder) ||
         (has(kConfig) && !is_run(folder));
}

/// Whether this job was the last to start the run in the folder, according to its log.
bool was_started_by(const fs::path& folder, const std::string& job) {
  std::string last;
  RunLog(folder).read(ReadSteps::kNo, [&](const nlohmann::ordered_json& line) {
    if (field_of<std::string>(line, "event", "") == "start") {
      last = field_of<std::string>(line, "job", "");
    }
  });
  return !job.empty() && last == job;
}

/// Removes files that a killed run was writing: ".last.pt.ID.tmp".
void remove_temporaries(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const auto is_of = [&](const std::string& file) {
      return name.starts_with("." + file) && name.ends_with(".tmp");
    };
    const bool is_ours = std::ranges::any_of(kFiles, is_of) ||
                         std::ranges::any_of(kOthers, is_of) || is_of(kBestPrefix);
    if (is_ours) fs::remove(entry.path(), ignored);
  }
}

/// runs/`name` and its numbered successors that hold a run, the first ones first.
std::vector<fs::path> runs_of(const std::string& name) {
  std::vector<fs::path> found;
  fs::path next = wanted_path("", name);
  for (int number = 2; holds_run(next); ++number) {
    found.push_back(next);
    next = numbered(name, number);
  }
  return found;
}

/// When a run last wrote its log.
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

/// Looks in a folder that is not a run's for files that a run would replace.
/// @throws base::UserError if there are any: they are the user's work
void refuse_others_work(const fs::path& folder) {
  std::vector<fs::path> found = {folder / kConfig, folder / kPictures, ProfileFiles(folder).folder};
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

/// Refuses a folder with other files: a run's would be mixed with them. Ignores hidden files, those
/// of new file systems, and the launcher's --log_dir.
void refuse_folder_of_others(const fs::path& folder) {
  if (is_run(folder)) return;
  std::error_code ignored;
  const fs::path in_logs = base::env("TORCHELASTIC_ERROR_FILE").value_or("");
  const fs::path place = fs::weakly_canonical(in_logs, ignored)
                             .lexically_relative(fs::weakly_canonical(folder, ignored));
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with('.') || name == "lost+found") continue;
    if (!place.empty() && name == *place.begin()) continue;
    if (base::exists(entry.path() / "attempt_0")) continue;  // another or earlier launcher's
    throw base::UserError(fmt::format(
        "run_dir: {} is not empty and holds no run, but {}; choose another folder, or write into "
        "this one (--overwrite)",
        folder.string(), name));
  }
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
      {ProfileFiles(folder).folder, {"trace-*.json*", "summary.json", "request"}}};
  for (const auto& [path, patterns] : folders) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path, ignored)) {
      const std::string name = entry.path().filename();
      const auto is_of = [&name](const std::string& pattern) {
        return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
      };
      if (std::ranges::any_of(patterns, is_of)) fs::remove(entry.path(), ignored);
    }
    fs::remove(path, ignored);  // fails if others' files are left in it
  }
}

}  // namespace

fs::path wanted_path(const std::string& wanted, const std::string& name) {
  return wanted.empty() ? fs::path("runs") / name : fs::path(wanted);
}

fs::path newest(const std::string& wanted, const std::string& name) {
  const fs::path first = wanted_path(wanted, name);
  if (!wanted.empty()) return first;
  const std::vector<fs::path> runs = runs_of(name);
  const auto newest = std::ranges::max_element(runs, {}, last_written);
  return newest == runs.end() ? first : *newest;
}

std::optional<fs::path> of_checkpoint(const fs::path& file, const std::string& wanted,
                                      const std::string& name) {
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  for (const fs::path& run : wanted.empty() ? runs_of(name) : std::vector<fs::path>{wanted}) {
    std::error_code ignored;
    if (fs::equivalent(folder, run, ignored)) return run;
  }
  return std::nullopt;
}

fs::path choose(const std::string& wanted, const std::string& name, bool resume, bool overwrite) {
  fs::path first = wanted_path(wanted, name);
  if (resume) return newest(wanted, name);
  if (!overwrite && !wanted.empty() && !holds_run(first)) refuse_folder_of_others(first);
  if (overwrite || !holds_run(first)) return first;
  if (!wanted.empty()) {
    throw base::UserError(
        fmt::format("run_dir: {} already holds a run; choose another folder, resume it "
                    "(--resume auto) or replace it (--overwrite)",
                    first.string()));
  }
  return numbered(name, static_cast<int>(runs_of(name).size()) + 1);
}

std::optional<fs::path> of_job(const std::string& id, const std::string& wanted,
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

bool is_run(const fs::path& folder) {
  return std::ranges::any_of(
      kFiles, [&](const char* file) { return file != kConfig && base::exists(folder / file); });
}

bool has_result(const fs::path& folder) {
  return base::exists(folder / kResult);
}

bool is_unfinished(const fs::path& folder) {
  return !checkpoints(folder).empty() && !has_result(folder) && !is_locked(folder);
}

std::optional<std::string> config_of(const fs::path& folder) {
  if (!base::exists(folder / kConfig)) return std::nullopt;
  return base::read_file(folder / kConfig);
}

std::vector<fs::path> checkpoints(const fs::path& folder) {
  std::vector<fs::path> found = numbered_files(folder, kStepPrefix);
  const fs::path last = folder / kLast;
  std::error_code error;
  // A dangling symbolic link, for example to a missing disk, does not mean "no checkpoint".
  const fs::file_status status = fs::symlink_status(last, error);
  // Nor does a disk that fails: the run would begin anew and remove what it has not seen.
  if (!fs::status_known(status)) {
    base::throw_file_error(fmt::format("cannot read {}", last.string()), error.value());
  }
  if (fs::exists(status)) found.insert(found.begin(), last);
  return found;
}

std::string best_name(int64_t step) {
  return fmt::format("{}{:012}{}", kBestPrefix, step, kSuffix);
}

bool is_best(const std::string& name) {
  return name == kBest || (fs::path(name).filename() == name && number_of(name, kBestPrefix));
}

std::vector<std::string> history(const fs::path& folder) {
  std::vector<fs::path> files = numbered_files(folder, kBestPrefix);
  for (const char* file : {kLog, kBest}) files.push_back(folder / file);
  std::vector<std::string> names;
  for (const fs::path& file : files) {
    if (base::exists(file)) names.push_back(file.filename());
  }
  return names;
}

void refuse_if_saved(const fs::path& folder) {
  if (!base::exists(folder / kLast) && !has_result(folder)) return;
  throw base::UnavailableError(
      fmt::format("another run has used {} since this one started; start again to resume it, or "
                  "choose another run_dir",
                  folder.string()));
}

void make_ready(const fs::path& folder, bool resume) {
  if (!is_run(folder)) {
    refuse_others_work(folder);
  } else if (!resume) {
    remove_run(folder);
  } else {
    std::error_code ignored;
    fs::remove(folder / kResult, ignored);
  }
  remove_temporaries(folder);
}

void rotate(const fs::path& folder, int64_t step, int64_t keep_last) {
  const fs::path last = folder / kLast;
  if (keep_last > 1) {
    const fs::path kept = folder / fmt::format("{}{:012}{}", kStepPrefix, step, kSuffix);
    std::error_code error;
    fs::create_hard_link(last, kept, error);
    // Some file systems have no links, and there may be no last.pt.
    const bool has_links = !error || error == std::errc::file_exists;
    if (!has_links && base::exists(last)) {
      base::write_file_atomically(kept, base::read_file(last));
    }
  }
  const std::vector<fs::path> former = numbered_files(folder, kStepPrefix);
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < former.size(); ++i) {
    std::error_code ignored;
    fs::remove(former[i], ignored);
  }
}

void set_aside_after(const fs::path& folder, int64_t step, const fs::path& resumed,
                     const std::map<std::string, int64_t>& best) {
  std::error_code ignored;
  for (const fs::path& file : checkpoints(folder)) {
    const auto number = number_of(file, kStepPrefix);
    const bool is_later = number ? *number > step : !fs::equivalent(file, resumed, ignored);
    if (is_later) fs::rename(file, file.string() + ".abandoned", ignored);
  }
  if (const auto first = best.find(kBest); first != best.end()) {
    fs::rename(folder / best_name(first->second), folder / kBest, ignored);  // if it is there
  }
  for (const fs::path& file : numbered_files(folder, kBestPrefix)) {
    if (!best.contains(file.filename())) fs::remove(file, ignored);
  }
}

}  // namespace syncbn::train::run_files

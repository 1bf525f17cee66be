#include "output/log_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/private_folder.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "common/descriptors.h"
#include "common/json_messages.h"
#include "common/processes.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

void make_folders(const fs::path& path) {
  const int error = base::make_private_folder(path);
  if (error == 0) return;
  base::throw_file_error(fmt::format("cannot make the log folder {}", path.string()), error);
}

bool writes_logs(const LaunchOptions& options) {
  for (int rank = 0; rank < options.nproc_per_node; ++rank) {
    for (const Streams streams : {options.redirects.of(rank), options.tee.of(rank)}) {
      if (streams.out || streams.err) return true;
    }
  }
  return !options.log_dir.empty() || options.events == EventTarget::kLogFolder ||
         !options.duplicate_stdout_filters.empty() || !options.duplicate_stderr_filters.empty();
}

// Locks a folder that this user owns; empty if it cannot.
base::UniqueFd lock_folder(const fs::path& path, int kind) {
  base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat what {};
  const bool is_ours = fd && ::fstat(fd.get(), &what) == 0 && what.st_uid == ::geteuid();
  return is_ours && ::flock(fd.get(), kind) == 0 ? std::move(fd) : base::UniqueFd();
}

// Empty unless the file is a regular one: a worker may have put a pipe, a folder or a link to
// another user's file there.
std::string read_regular(const fs::path& path, uintmax_t start, size_t max_bytes) {
  const base::UniqueFd fd = base::open_to_read(path, O_NOFOLLOW);
  struct stat what {};
  if (!fd || ::fstat(fd.get(), &what) != 0 || !S_ISREG(what.st_mode)) return "";
  return read_at(fd.get(), static_cast<off_t>(start), max_bytes);
}

// The size of the files that the attempts of a run without logs have left.
uintmax_t bytes_in(const fs::path& folder) {
  uintmax_t bytes = 0;
  for (const fs::path& attempt : entries_of(folder)) {
    for (const fs::path& file : entries_of(attempt)) {
      struct stat what {};
      if (::lstat(file.c_str(), &what) == 0) bytes += static_cast<uintmax_t>(what.st_size);
    }
  }
  return bytes;
}

}  // namespace

LogFolder::LogFolder(const LaunchOptions& options)
    : nproc_per_node_(options.nproc_per_node),
      discards_(options.log_dir == "/dev/null"),
      temporary_(options.log_dir.empty() || discards_),
      wanted_(!discards_ && writes_logs(options)),
      keep_(wanted_) {
  if (temporary_) {
    template_ = base::env("TMPDIR").value_or("/tmp") +
                (wanted_ ? "/syncbn-launch-XXXXXX" : "/syncbn-launch-errors-XXXXXX");
  } else {
    make_folders(options.log_dir);
    std::string name = options.run_id.substr(0, 100);
    std::ranges::replace(name, '/', '_');
    template_ = fs::absolute(options.log_dir) / (name + "_XXXXXX");
  }
  make();
}

void LogFolder::check(const LaunchOptions& options) {
  std::error_code ignored;
  fs::remove(LogFolder(options).path(), ignored);
}

void LogFolder::make() {
  std::string name = template_;
  if (::mkdtemp(name.data()) == nullptr) {
    base::throw_file_error(
        fmt::format("cannot make a folder {} ({})", name, temporary_ ? "TMPDIR" : "--log_dir"),
        errno);
  }
  folder_ = name;
  lock_ = lock_folder(folder_, LOCK_SH);
}

void LogFolder::keep() {
  const bool is_first = !std::exchange(keep_, true);
  if (is_first && temporary_) remove_oldest_kept();
}

void LogFolder::remove_oldest_kept() const {
  const fs::path form = template_;
  const std::string name = form.filename();
  const std::string prefix = name.substr(0, name.find("XXXXXX"));
  std::multimap<fs::file_time_type, fs::path, std::greater<>> all;  // the latest first
  std::error_code ignored;
  for (const fs::path& entry : entries_of(form.parent_path())) {
    const std::string other = entry.filename();
    if (other.size() != name.size() || !other.starts_with(prefix)) continue;
    const auto written = fs::last_write_time(entry, ignored);
    if (lock_folder(entry, LOCK_EX | LOCK_NB)) all.emplace(written, entry);
  }
  uintmax_t bytes = 0;
  size_t count = 1;
  for (const auto& [written, path] : all) {
    bytes += bytes_in(path);
    if (++count <= kMaxKept && bytes <= kMaxKeptBytes) continue;
    if (lock_folder(path, LOCK_EX | LOCK_NB)) fs::remove_all(path, ignored);
  }
}

void LogFolder::remove() const {
  std::error_code ignored;
  if (temporary_ && !keep_) fs::remove_all(folder_, ignored);
}

std::vector<fs::path> LogFolder::former(const char* name) const {
  std::vector<fs::path> files = entries_of(folder_);
  std::erase(files, attempt_);
  for (fs::path& file : files) file /= name;
  return files;
}

void LogFolder::clean_up() {
  if (keep_) return;
  remove();
  lock_.reset();
  folder_.clear();
}

void LogFolder::begin_attempt(int number) {
  if (folder_.empty()) make();
  attempt_ = folder_ / fmt::format("attempt_{}", number);
  make_folders(attempt_);
  for (int rank = 0; wanted_ && rank < nproc_per_node_; ++rank) make_folders(of_worker(rank));
}

fs::path LogFolder::of_worker(int local_rank) const {
  return attempt_ / std::to_string(local_rank);
}

fs::path LogFolder::error_file(int local_rank) const {
  // Making a folder for each worker takes longer than starting it.
  return wanted_ ? of_worker(local_rank) / "error.json"
                 : attempt_ / fmt::format("error_{}.json", local_rank);
}

fs::path LogFolder::file(const fs::path& folder, const char* name) const {
  return discards_ ? fs::path("/dev/null") : folder / name;
}

std::string LogFolder::error_message(int local_rank) const {
  constexpr size_t kMaxBytes = 1 << 20;
  std::string text = read_regular(error_file(local_rank), 0, kMaxBytes);
  const auto json = parse_json(text);
  // {"message": {"message": "ValueError: …", "extraInfo": {…}}} or {"message": "…"}
  for (const char* path : {"/message/message", "/message"}) {
    const nlohmann::json::json_pointer pointer(path);
    if (json.contains(pointer) && json.at(pointer).is_string()) return json.at(pointer);
  }
  return text;
}

std::vector<std::string> LogFolder::tail(const fs::path& path, size_t lines) {
  constexpr size_t kMaxBytes = 65536;
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  const uintmax_t start = error || size < kMaxBytes ? 0 : size - kMaxBytes;
  std::string text = read_regular(path, start, kMaxBytes);
  // The first line is incomplete: its beginning was skipped.
  if (start > 0) text.erase(0, std::min(text.find('\n'), text.size()) + 1);
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(line);
  all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(std::min(lines, all.size())));
  return all;
}

}  // namespace syncbn::launch

#include "index/file_stamp.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace syncbn::data::detail {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t nanoseconds(const timespec& time) {
  return time.tv_sec * kSecond + time.tv_nsec;
}

/// Upper bound on a tick of the clock that the file's times come from, in nanoseconds.
int64_t tick_of(const FileStamp& stamp) {
  const bool whole_seconds = stamp.modified_ns % kSecond == 0 && stamp.changed_ns % kSecond == 0;
  return whole_seconds ? 2 * kSecond : kSecond / 50;
}

FileStamp stamp_from(const struct stat& status) {
  return {.inode = status.st_ino,
          .size = static_cast<uint64_t>(status.st_size),
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim)};
}

}  // namespace

FileStamp stamp_of(const std::filesystem::path& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? stamp_from(status) : FileStamp{};
}

FileStamp stamp_of(const base::UniqueFd& file) {
  struct stat status {};
  return ::fstat(file.get(), &status) == 0 ? stamp_from(status) : FileStamp{};
}

FileStamp settled_stamp_of(const std::filesystem::path& path) {
  // A file that is written all the time never settles.
  constexpr int kMaxRounds = 5;
  FileStamp stamp = stamp_of(path);
  for (int round = 0; round < kMaxRounds; ++round) {
    const auto now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch());
    const int64_t age = now.count() - std::max(stamp.modified_ns, stamp.changed_ns);
    // A timestamp in the future means the file server's clock is ahead: do not wait for it.
    if (age < 0 || age >= tick_of(stamp)) break;
    std::this_thread::sleep_for(std::chrono::nanoseconds(tick_of(stamp) - age));
    stamp = stamp_of(path);
  }
  return stamp;
}

}  // namespace syncbn::data::detail

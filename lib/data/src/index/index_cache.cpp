#include "index/index_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::milliseconds(10);

/// According to the XDG Base Directory Specification.
std::optional<fs::path> default_cache_folder() {
  const auto cache = base::env("XDG_CACHE_HOME");
  if (cache && cache->starts_with('/')) return fs::path(*cache) / "syncbn";
  const auto home = base::env("HOME");
  if (home) return fs::path(*home) / ".cache/syncbn";
  return std::nullopt;
}

/// The host name is part of the hash: otherwise, hosts that share a folder would replace each
/// other's mapped files.
std::string file_name_of(const std::string& key) {
  base::Fnv1a hash;
  hash.add_bytes(base::hostname());
  hash.add_byte(0);
  hash.add_bytes(key);
  return fmt::format("{:016x}.index", hash.value());
}

/// A lock on building the index. The system releases it when the process ends.
class BuildLock {
 public:
  /// @throws base::UnavailableError if another process still holds it after the timeout.
  BuildLock(const fs::path& path, const std::string& name, std::chrono::milliseconds timeout)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    const auto deadline = Clock::now() + timeout;
    while (is_taken()) {
      if (Clock::now() >= deadline) {
        throw base::UnavailableError(fmt::format(
            "waited {} for process {}, which builds the index of '{}'; if it hangs, end it, "
            "otherwise start again when it is done",
            base::format_seconds(timeout), holder(), name));
      }
      std::this_thread::sleep_for(kPoll);
    }
    write_holder();
  }

  /// False if the file system has no locks. Several processes may then build the same index, which
  /// is wasteful but harmless.
  bool is_held() const { return is_held_; }

 private:
  bool is_taken() {
    is_held_ = ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0;
    return !is_held_ && (errno == EWOULDBLOCK || errno == EINTR);
  }

  /// Writes this process's id for the messages of others; may fail.
  void write_holder() const {
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(file_.get(), 0) == 0) {
      [[maybe_unused]] const ssize_t n = ::pwrite(file_.get(), pid.data(), pid.size(), 0);
    }
  }

  std::string holder() const {
    char text[32] = {};
    const ssize_t n = ::pread(file_.get(), text, sizeof text - 1, 0);
    const std::string_view pid(text, n > 0 ? static_cast<size_t>(n) : 0);
    return std::string(pid.substr(0, pid.find('\n')));
  }

  base::UniqueFd file_;
  bool is_held_ = false;
};

class CachedIndex {
 public:
  CachedIndex(const IndexSource& source, const IndexCacheOptions& options)
      : source_(source),
        options_(options),
        is_first_(base::env_int("LOCAL_RANK", 0, INT32_MAX).value_or(0) == 0) {}

  MappedIndex open() {
    const auto folder =
        options_.folder.empty() ? default_cache_folder() : std::optional(options_.folder);
    if (!folder) return in_memory("neither HOME nor XDG_CACHE_HOME is set");
    path_ = *folder / file_name_of(source_.key);
    try {
      return in_file();
    } catch (const IndexFileError& error) {
      return in_memory(fmt::format("{}: {}", path_.string(), error.what()));
    }
  }

 private:
  /// @throws IndexFileError if no file can be written. It releases the lock first, so that ranks
  ///   can build in memory at the same time.
  MappedIndex in_file() const {
    // Taken before the check, to notice a file that replaces the old one during the check.
    const FileStamp before = stamp_of(path_);
    if (auto index = current()) return std::move(*index);
    try {
      base::check_can_write(path_);
    } catch (const base::Error& error) {
      throw IndexFileError(error.what());
    }
    if (!is_first_) wait_for_another(before);
    const BuildLock lock(path_.string() + ".lock", source_.name, options_.timeout);
    if (auto index = current()) return std::move(*index);
    // Without the lock, other processes may still be writing.
    if (lock.is_held()) remove_leftovers();
    return build();
  }

  /// The existing index, if it is valid and current.
  std::optional<MappedIndex> current() const {
    const base::UniqueFd file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) return std::nullopt;
    auto index = MappedIndex::open(file);
    const bool is_usable = index && index->text(kKeySection) == source_.key;
    if (!is_usable || !source_.is_current(*index)) return std::nullopt;
    return index;
  }

  /// Waits until the host's first rank replaces the file with this stamp.
  void wait_for_another(const FileStamp& before) const {
    const auto deadline = Clock::now() + options_.head_start;
    while (stamp_of(path_) == before && Clock::now() < deadline) std::this_thread::sleep_for(kPoll);
  }

  MappedIndex build() const {
    base::UniqueFd file;
    std::exception_ptr data_error;
    try {
      base::write_file_atomically(path_, [&](const fs::path& temporary) {
        file.reset(::open(temporary.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
        if (!file) base::throw_file_error("cannot create " + temporary.string(), errno);
        try {
          write(file);
        } catch (const IndexFileError&) {
          throw;
        } catch (...) {
          data_error = std::current_exception();
          throw;
        }
      });
    } catch (const base::Error& error) {
      if (data_error) std::rethrow_exception(data_error);
      throw IndexFileError(error.what());
    }
    return opened(file);
  }

  /// Removes temporary files of builders that were killed. The caller holds the lock.
  void remove_leftovers() const {
    const std::string temporary = fmt::format(".{}.", path_.filename().string());
    std::error_code error;
    fs::directory_iterator entry(path_.parent_path(), error);
    while (!error && entry != fs::directory_iterator()) {
      const fs::path file = entry->path();
      entry.increment(error);
      std::error_code ignored;
      if (file.filename().string().starts_with(temporary)) fs::remove(file, ignored);
    }
  }

  MappedIndex in_memory(const std::string& why) const {
    static std::mutex mutex;
    static std::set<fs::path> reported;  // folders: one warning for all splits
    const std::lock_guard lock(mutex);
    if (is_first_ && reported.insert(path_.parent_path()).second) {
      spdlog::warn(
          "the index of '{}' is kept in each process's memory, since no file can be written: {}",
          source_.name, why);
    }
    const base::UniqueFd file(::memfd_create("syncbn-index", MFD_CLOEXEC));
    if (!file) base::throw_errno("cannot make an index in memory");
    write(file);
    return opened(file);
  }

  void write(const base::UniqueFd& file) const {
    const auto begin = Clock::now();
    IndexWriter writer(file);
    writer.begin(kKeySection);
    writer.add_bytes(source_.key);
    writer.finish(source_.build(writer));
    const std::chrono::duration<double> took = Clock::now() - begin;
    if (took > std::chrono::seconds(1)) {
      spdlog::info("built the index of '{}' in {}", source_.name, base::format_seconds(took));
    }
  }

  static MappedIndex opened(const base::UniqueFd& file) {
    auto index = MappedIndex::open(file);
    if (!index) throw IndexFileError("an index that was just written cannot be read");
    return std::move(*index);
  }

  const IndexSource& source_;
  const IndexCacheOptions& options_;
  const bool is_first_;
  fs::path path_;
};

}  // namespace

MappedIndex open_index(const IndexSource& source, const IndexCacheOptions& options) {
  return CachedIndex(source, options).open();
}

}  // namespace syncbn::data::detail

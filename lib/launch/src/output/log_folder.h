#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace syncbn::launch {

/// The folder of a run, laid out as torchrun's:
/// `<log_dir>/<run id>_xxxxxx/attempt_<N>/<local rank>/` with stdout.log, stderr.log and
/// error.json, where torch's @record leaves a worker's exception (TORCHELASTIC_ERROR_FILE).
///
/// Without a log_dir the folder is in TMPDIR. It is removed at the end unless the options ask for
/// logs or a report refers to a file in it (keep()). With log_dir=/dev/null logs are dropped.
class LogFolder {
 public:
  /// @throws base::UserError if the path does not allow a folder, base::UnavailableError if the
  ///   disk fails.
  explicit LogFolder(const LaunchOptions& options);
  ~LogFolder() { remove(); }
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  /// Throws what the constructor would, and leaves no folder behind.
  static void check(const LaunchOptions& options);

  /// Creates the folders of an attempt. The functions below refer to the last one.
  void begin_attempt(int number);
  /// Removes the folder unless it is kept; begin_attempt() creates another. For times without a
  /// keeper: only a keeper removes the folder of a launcher that is killed.
  void clean_up();

  const std::filesystem::path& path() const { return folder_; }
  std::filesystem::path attempt() const { return attempt_; }
  std::filesystem::path of_worker(int local_rank) const;
  std::filesystem::path error_file(int local_rank) const;
  /// A log file in `folder`, or /dev/null if logs are dropped.
  std::filesystem::path file(const std::filesystem::path& folder, const char* name) const;
  /// Whether the options ask for more than error files.
  bool is_wanted() const { return wanted_; }

  /// The message in a worker's error file; the whole text if it is not torch's JSON; empty if there
  /// is no file.
  std::string error_message(int local_rank) const;

  static std::vector<std::string> tail(const std::filesystem::path& path, size_t lines);

  /// The files of this name that former attempts may have left.
  std::vector<std::filesystem::path> former(const char* name) const;

  /// Upper bounds on the folders that runs without logs keep in TMPDIR, which may be in memory: a
  /// service that restarts a failing job would leave one each time.
  static constexpr size_t kMaxKept = 32;
  static constexpr uintmax_t kMaxKeptBytes = uintmax_t{256} << 20;  ///< of former runs
  /// Keeps the folder. Removes the oldest of the folders without logs that former runs of this user
  /// have kept.
  void keep();
  /// Undoes keep() after a run that succeeded in the end.
  void release_errors() { keep_ = wanted_; }
  /// Removes the folder if it is temporary and not kept.
  void remove() const;

 private:
  void make();
  void remove_oldest_kept() const;

  int nproc_per_node_;
  bool discards_;
  bool temporary_;
  bool wanted_;
  bool keep_;
  std::string template_;  ///< for mkdtemp
  std::filesystem::path folder_;
  base::UniqueFd lock_;  ///< tells other launchers that the folder is in use
  std::filesystem::path attempt_;
};

}  // namespace syncbn::launch

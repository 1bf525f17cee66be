#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <filesystem>
#include <string>
#include <vector>

namespace syncbn::launch {

/// The folder of a run, laid out as torchrun's:
/// `<log_dir>/<run id>_xxxxxx/attempt_<N>/<local rank>/` with stdout.log, stderr.log and
/// error.json, where torch's @record leaves a worker's exception (TORCHELASTIC_ERROR_FILE).
///
/// Without a log_dir it lies in TMPDIR, and is removed at the end unless logs were asked for or
/// somebody was pointed to an error file (keep()). With /dev/null for a log_dir what would go to
/// log files is lost.
class LogFolder {
 public:
  /// @throws base::UserError where the folder cannot be, base::UnavailableError when the disk
  /// fails.
  explicit LogFolder(const LaunchOptions& options);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  /// Throws what the constructor would, and leaves no folder of a run behind.
  static void check(const LaunchOptions& options);

  /// Makes the folders of an attempt; the functions below are about it.
  void begin_attempt(int number);
  /// Before a wait in which nobody would remove it after a kill: it is made anew when needed.
  void put_away();

  const std::filesystem::path& path() const { return folder_; }
  std::filesystem::path attempt() const { return attempt_; }
  std::filesystem::path of_worker(int local_rank) const;
  std::filesystem::path error_file(int local_rank) const;
  /// A log file in the attempt's folder or a worker's.
  std::filesystem::path file(const std::filesystem::path& folder, const char* name) const;
  /// Whether there is more in it than error files.
  bool is_wanted() const { return wanted_; }

  /// A file to append to.
  static base::UniqueFd open(const std::filesystem::path& path);

  /// The message in a worker's error file; the whole file when it is no JSON of torch's; empty when
  /// there is none.
  std::string error_message(int local_rank) const;

  /// The last lines of a file, for workers whose stderr goes to one.
  static std::vector<std::string> tail(const std::filesystem::path& path, size_t lines);

  void keep() { keep_ = true; }
  /// The run went well in the end: its error files are of no more use.
  void forget_errors() { keep_ = wanted_; }
  /// Removes it if it is a temporary one that nobody wants.
  void remove() const;

 private:
  void make();

  int nproc_per_node_;
  bool discards_;
  bool temporary_;
  bool wanted_;
  bool keep_;
  std::string template_;  ///< as mkdtemp takes it
  std::filesystem::path folder_;
  std::filesystem::path attempt_;
};

}  // namespace syncbn::launch

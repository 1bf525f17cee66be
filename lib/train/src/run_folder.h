#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::train {

/// The results of an epoch. Losses are means over samples, accuracies in [0, 1].
struct EpochRecord {
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  double lr = 0;
  double train_loss = 0;
  std::optional<double> test_loss;
  std::optional<double> test_accuracy;
  double images_per_second = 0;
  // Waits for data of the rank that waited the longest.
  double data_wait_seconds = 0;  ///< mean of a step
  double data_wait_share = 0;    ///< share of the epoch's training time
  double seconds = 0;            ///< of the run so far
};

/// The content of result.json.
struct ResultRecord {
  double best_test_accuracy = 0;
  int64_t best_epoch = 0;
  EpochRecord last;
  int64_t world_size = 1;
  int64_t seed = 0;
  bool sync_batchnorm = true;
};

/// The folder of one run: config.yaml, log.jsonl, last.pt, best.pt and, once it has finished,
/// result.json. Rank 0's only; not thread-safe.
class RunFolder {
 public:
  static constexpr const char* kLast = "last.pt";  ///< the checkpoint to resume from
  static constexpr const char* kBest = "best.pt";  ///< that of the best test accuracy

  /// `wanted`, or runs/`name` if that is empty.
  static std::filesystem::path wanted_path(const std::string& wanted, const std::string& name);

  /// The newest run in `wanted`, or in runs/`name`, runs/name-2, ...
  static std::filesystem::path newest(const std::string& wanted, const std::string& name);

  /// The folder for a run: wanted_path(). If that holds a run and neither `resume` nor `overwrite`
  /// is set, the next free one of runs/name-2, runs/name-3, ... Writes nothing.
  /// @throws base::UserError instead if `wanted` names the folder.
  static std::filesystem::path choose(const std::string& wanted, const std::string& name,
                                      bool resume, bool overwrite);

  /// The folder that an earlier attempt of the job `id` (SYNCBN_JOB_ID) got from choose(); nothing
  /// if no attempt has got that far.
  static std::optional<std::filesystem::path> of_job(const std::string& id,
                                                     const std::string& wanted,
                                                     const std::string& name);

  /// Makes the folder. Removes temporary files of a run that was killed; without `resume`, all
  /// files of a run that it holds.
  RunFolder(std::filesystem::path path, const std::string& config, bool resume);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path last() const { return path_ / kLast; }
  std::filesystem::path best() const { return path_ / kBest; }

  /// Whether the folder holds a finished run.
  static bool has_result(const std::filesystem::path& folder);

  /// The line of log.jsonl about an epoch.
  static std::string line_of(const EpochRecord& record);
  static EpochRecord parse_line(const std::string& line);

  // These add lines to log.jsonl, which are on disk when the call returns.
  void log_start(int64_t world_size, int64_t step, bool resumed);
  void append(const std::string& line);
  /// Adds a checkpoint's epoch_line, unless the run wrote it before it ended.
  void complete_log(const std::string& line);
  void log_end(const std::string& reason, int64_t step);

  void write_result(const ResultRecord& record);

 private:
  std::filesystem::path path_;
  base::UniqueFd log_;
};

}  // namespace syncbn::train

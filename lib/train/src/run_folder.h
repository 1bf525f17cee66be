#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::train {

/// What the end of an epoch has to say. Losses are means over samples, accuracies in [0, 1].
struct EpochRecord {
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  double lr = 0;
  double train_loss = 0;
  std::optional<double> test_loss;
  std::optional<double> test_accuracy;
  double images_per_second = 0;
  /// What the rank that waited the longest waited for data: in a step on average, and as a share of
  /// the epoch's training time.
  double data_wait_seconds = 0;
  double data_wait_share = 0;
  double seconds = 0;  ///< of the run so far
};

/// How a run ended.
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
  // Checkpoints in any run's folder.
  static constexpr const char* kLast = "last.pt";  ///< to go on from
  static constexpr const char* kBest = "best.pt";

  /// `wanted`, or runs/`name` when that is empty.
  static std::filesystem::path wanted_path(const std::string& wanted, const std::string& name);

  /// Where a run shall write: wanted_path() (where none is wanted, the next free of
  /// runs/name, runs/name-2, ... unless `resume` or `overwrite`).
  /// @throws base::UserError when it holds a run and neither is set. Writes nothing.
  static std::filesystem::path choose(const std::string& wanted, const std::string& name,
                                      bool resume, bool overwrite);

  /// The folder of a run that the job `id` (SYNCBN_JOB_ID) began in an earlier attempt, where
  /// choose() would have let it; nothing when it did not come so far.
  static std::optional<std::filesystem::path> of_job(const std::string& id,
                                                     const std::string& wanted,
                                                     const std::string& name);

  /// Whether a folder holds anything of a run.
  static bool holds_run(const std::filesystem::path& path);

  /// Makes the folder; `resume` keeps what it holds, otherwise the files of a former run go.
  RunFolder(std::filesystem::path path, const std::string& config, bool resume);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path last() const { return path_ / kLast; }
  std::filesystem::path best() const { return path_ / kBest; }

  /// The line of log.jsonl about an epoch.
  static std::string line_of(const EpochRecord& record);

  // Lines of log.jsonl, each on disk when the call returns.
  void log_start(int64_t world_size, int64_t step, bool resumed);
  void append(const std::string& line);
  /// Adds the line of a checkpoint's last epoch if the run ended after the checkpoint and before
  /// it.
  void complete_log(const std::string& line);
  void log_end(const std::string& reason, int64_t step);

  void write_result(const ResultRecord& record);

 private:
  std::filesystem::path path_;
  base::UniqueFd log_;
};

}  // namespace syncbn::train

#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>
#include <syncbn/data/image.h>

#include "records/event_file.h"
#include "records/metrics_table.h"
#include "records/run_files.h"
#include "records/step_time.h"

namespace syncbn::train {

/// Creates the folder, and keeps other runs from writing to it while the descriptor is open. The
/// descriptor locks nothing on file systems without locks, and if a restarted job does not get the
/// lock.
/// @throws base::UserError when another run is writing to it
base::UniqueFd lock_of_run(const std::filesystem::path& folder);

/// The folder of one run: config.yaml, log.jsonl and what is derived from its lines (metrics.csv
/// and TensorBoard's event files), checkpoints and, once the run has finished, result.json. Only
/// keepers have one. Not thread-safe, except that one other thread may write checkpoints.
class RunFolder {
 public:
  /// Creates the folder and calls run_files::make_ready().
  /// @param lock lock_of_run(), if the caller has it
  /// @throws base::UserError when another run is writing to it
  RunFolder(std::filesystem::path path, const std::string& config, bool resume,
            std::optional<base::UniqueFd> lock = {});
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path last() const { return path_ / run_files::kLast; }

  // Lines about steps and epochs become rows of metrics.csv and curves of TensorBoard as well.

  /// Adds a line to log.jsonl. While steps go on, lines are written after a tenth of a second at
  /// the latest: a small network has a thousand steps a second.
  void log_step(int64_t step, int64_t epoch, double loss, double lr, double data_wait_seconds);

  /// Writes the lines of log_step(). Call it before saving a checkpoint: the log then has all steps
  /// before it, even if the run is killed.
  void write_lines();

  // These add lines to log.jsonl. Unless noted, the lines are on disk when the call returns.
  /// @param total_steps number of steps that the run will have at its end
  void log_start(int64_t world_size, int64_t step, bool resumed, int64_t total_steps = 0);
  void append(const std::string& line);
  /// Makes the log that of a run after `step` and this many whole `epochs`: removes lines about
  /// later ones, which the run writes again, and adds a checkpoint's epoch_line if it is missing.
  void rewind_log(int64_t step, int64_t epochs, const std::string& epoch_line);
  /// Whether the log has an end: the launcher writes the first failure there.
  bool has_end();
  /// Logs why the run ends. Only the first call counts.
  void log_end(const std::string& reason, int64_t step, std::optional<double> seconds = {});
  /// Adds a line that is written with the next one.
  /// @param times of all ranks in this epoch
  void log_step_time(int64_t epoch, int64_t step, const std::vector<StepTime>& times);

  /// Writes pictures/NAME-STEP.png, and shows it in TensorBoard.
  void write_picture(const std::string& name, int64_t step, const data::Image& image);

  /// Shows a histogram in TensorBoard, written with the next line of the log.
  void log_histogram(const std::string& name, int64_t step, const Histogram& histogram);

  /// Replaces one of run_files, or a file about the last evaluation, such as confusion.csv.
  void replace_file(const std::string& name, const std::string& bytes);

 private:
  void open_log();
  void add_record(const LogRecord& record);
  /// Writes metrics.csv anew, with all columns and rows of the log.
  /// @param needs_evaluation if the log has none, remove the file
  void write_table(bool needs_evaluation = false);
  /// Writes metrics.csv, and begins an event file, with the records of the log: a run of an earlier
  /// version or on another node's disk may lack these files.
  void open_records();
  /// If the log has been removed, begins new ones: lock, log, config.yaml and records.
  void restore_removed();

  std::filesystem::path path_;
  const std::string config_;
  base::UniqueFd lock_;
  base::UniqueFd log_;
  std::optional<MetricsTable> metrics_;  ///< from the first evaluation on, with its columns
  EventFile events_;
  std::string lines_;  ///< of the log, not written yet
  std::chrono::steady_clock::time_point written_;
  bool has_ended_ = false;  ///< log_end() was called
};

}  // namespace syncbn::train

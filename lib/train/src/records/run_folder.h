#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/base/unique_fd.h>
#include <syncbn/data/image.h>

#include "records/event_file.h"
#include "records/gpu_load.h"
#include "records/metrics_table.h"
#include "records/step_time.h"

namespace syncbn::train {

/// Results by name, in the order in which they are shown: {"loss", 0.1}, {"accuracy", 0.98}.
using Results = std::vector<std::pair<std::string, double>>;

/// The result of this name, if it is there.
std::optional<double> find(const Results& results, const std::string& name);

/// The results of an epoch. Losses are means over samples, shares in [0, 1].
struct EpochRecord {
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  double lr = 0;
  Results train = {};
  Results eval = {};            ///< empty: not evaluated
  std::string eval_split = {};  ///< "val" or "test"
  double images_per_second = 0;
  // Waits for data of the rank that waited the longest.
  double data_wait_seconds = 0;  ///< mean of a step
  double data_wait_share = 0;    ///< share of the epoch's training time
  /// That a process has had in RAM at most, of the rank with the most. 0: unknown.
  double memory_bytes = 0;
  std::optional<GpuLoad> gpu = {};  ///< empty on CPUs
  double seconds = 0;               ///< of the run so far
};

/// The content of result.json.
struct ResultRecord {
  std::string best_metric;  ///< "accuracy"; empty: none tells the best
  double best_value = 0;
  int64_t best_epoch = 0;
  bool higher_is_better = true;
  EpochRecord last;
  int64_t world_size = 1;
  int64_t seed = 0;
  bool sync_batchnorm = true;
};

/// The folder of one run: config.yaml, log.jsonl and what is made of its lines (metrics.csv and the
/// event files of TensorBoard), checkpoints and, once it has finished, result.json. Only keepers
/// have one; not thread-safe, but for writing checkpoints from one other thread.
class RunFolder {
 public:
  static constexpr const char* kConfig = "config.yaml";
  static constexpr const char* kLast = "last.pt";  ///< the checkpoint to resume from
  static constexpr const char* kBest = "best.pt";  ///< the network with the best result
  /// A page about the run, which anyone may write to show it; see syncbn/train/report.h.
  static constexpr const char* kReport = "report.html";

  /// Of the log's lines: readers refuse higher ones. Lines may get further keys without another
  /// version.
  static constexpr int64_t kFormatVersion = 1;
  static constexpr const char* kFormatVersionKey = "format_version";

  /// `wanted`, or runs/`name` if that is empty.
  static std::filesystem::path wanted_path(const std::string& wanted, const std::string& name);

  /// The run in `wanted`, or that of runs/`name`, runs/name-2, ... which was written to last.
  static std::filesystem::path newest(const std::string& wanted, const std::string& name);

  /// The folder of the run that a checkpoint lies in, if it is `wanted` or one of runs/`name`,
  /// runs/name-2, ...
  static std::optional<std::filesystem::path> of_checkpoint(const std::filesystem::path& file,
                                                            const std::string& wanted,
                                                            const std::string& name);

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
  /// @throws base::UserError when another run is writing to it.
  RunFolder(std::filesystem::path path, const std::string& config, bool resume);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path last() const { return path_ / kLast; }

  /// last.pt and the checkpoints before it, the newest first.
  static std::vector<std::filesystem::path> checkpoints(const std::filesystem::path& folder);

  /// Ahead of a new last.pt: gives the present one, saved after `step`, the name step-STEP.pt too,
  /// and keeps the newest `keep_last` - 1 of these.
  void rotate(int64_t step, int64_t keep_last) const;

  /// For a run that goes on after `step`, from `resumed`: renames checkpoints of later steps to
  /// X.abandoned, and last.pt as well, unless it is that file. Removes each best-STEP.pt but
  /// `best`.
  void set_aside_after(int64_t step, const std::filesystem::path& resumed,
                       const std::vector<std::string>& best) const;

  /// The name of a checkpoint that is kept for its result, besides best.pt.
  static std::string best_name(int64_t step);

  /// The names of the files that only a run's folder has: the log and the best checkpoints.
  static std::vector<std::string> history(const std::filesystem::path& folder);

  /// The text of a run's config.yaml; nothing if there is none.
  static std::optional<std::string> config_of(const std::filesystem::path& folder);

  /// The file log.jsonl, which every run has.
  static std::filesystem::path log(const std::filesystem::path& folder);

  /// The file of a finished run's result.
  static std::filesystem::path result(const std::filesystem::path& folder);

  /// The folder of write_picture().
  static std::filesystem::path pictures(const std::filesystem::path& folder);

  /// Whether a run has written to the folder: it has files of a run besides a config.yaml.
  static bool is_run(const std::filesystem::path& folder);
  /// Whether the folder holds a finished run.
  static bool has_result(const std::filesystem::path& folder);
  /// Whether a run could go on from the folder: it was stopped or killed after a checkpoint.
  static bool is_unfinished(const std::filesystem::path& folder);

  /// The line of log.jsonl about an epoch.
  static std::string line_of(const EpochRecord& record);
  static EpochRecord parse_line(const std::string& line);

  // Lines about steps and epochs become rows of metrics.csv and curves of TensorBoard as well.

  /// Adds a line to log.jsonl, in a tenth of a second at the latest if steps go on: a small network
  /// has a thousand steps a second.
  void log_step(int64_t step, int64_t epoch, double loss, double lr, double data_wait_seconds);

  /// Writes the lines of log_step(). Call it ahead of a checkpoint: if the run is killed then, the
  /// log has all steps before it.
  void write_lines();

  // These add lines to log.jsonl, which are on disk when the call returns.
  /// @param total_steps that the run will have at its end
  void log_start(int64_t world_size, int64_t step, bool resumed, int64_t total_steps = 0);
  void append(const std::string& line);
  /// Makes the log that of a run after `step` and so many whole `epochs`: removes lines about later
  /// ones, which the run writes again, and adds a checkpoint's epoch_line if it is missing.
  void rewind_log(int64_t step, int64_t epochs, const std::string& epoch_line);
  /// Of several reasons, the first counts.
  void log_end(const std::string& reason, int64_t step);
  /// @param times of all ranks in this epoch
  void log_step_time(int64_t epoch, int64_t step, const std::vector<StepTime>& times);

  /// Writes pictures/NAME-STEP.png, and shows it in TensorBoard.
  void write_picture(const std::string& name, int64_t step, const data::Image& image);

  /// Shows it in TensorBoard, with the next line of the log.
  void log_histogram(const std::string& name, int64_t step, const Histogram& histogram);

  /// Writes environment.json.
  void write_environment(const std::string& text);

  /// Replaces a file about the last evaluation, such as confusion.csv.
  void replace_file(const std::string& name, const std::string& bytes);

  void write_result(const ResultRecord& record);

 private:
  void open_log();
  void add_record(const LogRecord& record);
  /// Begins metrics.csv and an event file: with the records of the log, which a run of an earlier
  /// version or on another node's disk may have without them.
  void open_records();
  /// Begins the folder anew if someone has removed it.
  void restore_removed();

  std::filesystem::path path_;
  const std::string config_;
  base::UniqueFd lock_;
  base::UniqueFd log_;
  MetricsTable metrics_;
  EventFile events_;
  std::string lines_;  ///< of the log, not written yet
  std::chrono::steady_clock::time_point written_;
  bool has_ended_ = false;  ///< log_end() was called
};

}  // namespace syncbn::train

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "records/log_record.h"
#include "records/run_log.h"

namespace syncbn::train {

/// At most `width` characters: the highest value is a full block, the lowest an eighth of one. With
/// more values than that, a character shows the mean of several. NaN is blank.
std::string sparkline(const std::vector<double>& values, int width);

/// What a run's folder says about the run, during and after it. Not thread-safe.
class RunView {
 public:
  /// @throws base::UserError when the folder is not a run's
  explicit RunView(std::filesystem::path folder);

  /// Reads what is new.
  void update();

  /// Whether nothing more is to come: the run has finished, or no process has written to the folder
  /// for a while. Between two attempts of a job no process does, whatever ended the first one.
  bool is_over() const;

  /// At most `rows` lines of less than `columns` columns: the state, progress and time left, and a
  /// sparkline for each number that the run logs.
  std::vector<std::string> screen(int columns, int rows, bool colours) const;

  /// A line for each epoch since the last call, and one for the end of the run.
  std::vector<std::string> news();

 private:
  struct Series {
    std::string name;
    std::vector<double> values;
  };
  enum class State { kRunning, kFinished, kStopped };

  void take(const nlohmann::ordered_json& line);
  void add(const LogRecord& record);
  Series& series(const std::string& name);
  /// Whether its name continues the name of another series.
  bool is_of_class(const Series& one) const;
  State state() const;
  std::string state_text() const;
  std::string progress(int columns) const;

  std::filesystem::path folder_;
  int64_t epochs_ = 0;  ///< of the configuration; 0: unknown
  int64_t first_epoch_ = 1;
  bool is_locked_ = false;
  double now_ = 0;  ///< seconds since 1970, at the last update()

  // The log, as far as it is read.
  RunLog log_;
  std::vector<Series> series_;
  std::map<std::string, size_t> numbers_;  ///< index in series_
  std::optional<std::string> end_;         ///< the reason, once the last attempt has ended
  int64_t ranks_ = 0;
  int64_t first_step_ = 0;   ///< where the last attempt began
  int64_t total_steps_ = 0;  ///< 0: unknown
  double started_ = 0;       ///< the last attempt, in seconds since 1970
  LogRecord last_;
  std::optional<double> last_loss_;
  std::vector<LogRecord> new_epochs_;
  std::pair<double, int64_t> newest_;  ///< time and number of the last of all new_epochs_
  bool has_told_end_ = false;
  bool has_told_wait_ = false;
};

}  // namespace syncbn::train

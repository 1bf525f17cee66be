#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "records/log_record.h"

namespace syncbn::train {

/// metrics.csv: a row for each line of log.jsonl about a step or an epoch. Not thread-safe.
class MetricsTable {
 public:
  /// The first write() replaces the file.
  explicit MetricsTable(std::filesystem::path file);

  /// Adds a column for each value that has none. Call it before the first add().
  void add_columns(const LogRecord& record);
  /// Adds a row, without the values that have no column.
  void add(const LogRecord& record);

  /// Writes the rows added since the last call. @throws as base::throw_file_error()
  void write();

 private:
  std::filesystem::path file_;
  std::vector<std::string> columns_;
  std::map<std::string, size_t> numbers_;  ///< index of each column
  std::string rows_;                       ///< not written yet
  bool has_begun_ = false;                 ///< whether the file is this object's
};

}  // namespace syncbn::train

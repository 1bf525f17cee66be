#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "records/log_record.h"

namespace syncbn::train {

/// metrics.csv: a row for each line of log.jsonl about a step or an epoch. New columns are added at
/// the right end of all rows. Not thread-safe.
class MetricsTable {
 public:
  /// The first write() replaces the file.
  explicit MetricsTable(std::filesystem::path file);

  void add(const LogRecord& record);

  /// Writes the rows added since the last call. @throws as base::throw_file_error()
  void write();

 private:
  std::string header() const;
  /// Rewrites all rows with empty fields in the added columns.
  void widen(const std::vector<std::string>& added);

  std::filesystem::path file_;
  std::vector<std::string> columns_;
  std::map<std::string, size_t> numbers_;  ///< index of each column
  std::string rows_;                       ///< not written yet
  bool has_begun_ = false;                 ///< whether the file is this object's
};

}  // namespace syncbn::train

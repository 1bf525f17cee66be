#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace syncbn::train {

/// The numbers of a line of log.jsonl about a step or an epoch.
struct LogRecord {
  std::string event;  ///< "step" or "epoch"
  double time = 0;    ///< seconds since 1970
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  /// All other keys, in the order written. What JSON has as null is NaN.
  std::vector<std::pair<std::string, double>> values = {};
};

/// Nothing for a line that is cut off, or about something else.
std::optional<LogRecord> parse_record(const std::string& line);

/// Seconds since 1970, as records have them.
double unix_time();

}  // namespace syncbn::train

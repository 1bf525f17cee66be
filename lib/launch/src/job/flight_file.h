#pragma once

#include <syncbn/base/clock.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "job/rank_record.h"

namespace syncbn::launch {

/// The flight records of a node's ranks, as a file: lines of JSON. The first line is about the job;
/// then each rank has a line, whose object has the form of torch's flight records, with some keys
/// more; the last line says that the file is complete.
struct FlightFile {
  std::string job = {};
  int attempt = 0;
  int world_size = 1;
  std::string why = {};               ///< the reason for which it was written
  int64_t unix_ns = base::unix_ns();  ///< the time at which it was written
  std::vector<int> ranks = {};        ///< that the file has, or had before it was cut
  std::vector<RankRecord> records = {};
  bool is_complete = true;
  size_t damaged_lines = 0;

  void add(RankRecord record);
  std::string text() const;
  /// @param text of a file, perhaps cut or damaged.
  /// @throws base::UserError naming `path` if the first line is another one's.
  static FlightFile of(const std::string& text, const std::string& path);
};

/// What a rank's file for torch's fr_trace has: a pickle of the rank's line.
std::string torch_pickle(const RankRecord& record);

}  // namespace syncbn::launch

#pragma once

#include <syncbn/base/clock.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "job/rank_record.h"

namespace syncbn::launch {

/// The flight records of a node's ranks, or of a job's, as a file: lines of JSON. The first line is
/// about the job; then each rank has a line, whose object has the form of torch's flight records,
/// with some keys more; the last line says that the file is complete.
struct FlightFile {
  /// Upper bound on a file, in bytes: 128 MiB of records and the first line.
  static constexpr size_t kMaxBytes = size_t{132} << 20;

  /// A node whose records the file of all nodes lacks.
  struct Missing {
    std::string node;        ///< "node 1 (host)"
    std::vector<int> ranks;  ///< its workers
    std::string why;
  };

  std::string job = {};
  int attempt = 0;
  int world_size = 1;
  std::string why = {};               ///< the reason for which it was written
  int64_t unix_ns = base::unix_ns();  ///< the time at which it was written
  std::vector<int> ranks = {};        ///< that the file has, or had before it was cut
  bool has_all_nodes = false;
  std::vector<Missing> missing = {};  ///< if it has all nodes
  std::vector<RankRecord> records = {};
  bool is_complete = true;
  size_t damaged_lines = 0;

  void add(RankRecord record);
  std::string text() const;
  /// @param text of a file, perhaps cut or damaged.
  /// @throws base::UserError naming `path` if the first line is another one's, or a line has more
  ///   than any record.
  static FlightFile of(const std::string& text, const std::string& path);
};

nlohmann::json json_of(const std::vector<FlightFile::Missing>& missing);
/// @throws nlohmann's exceptions if `json` has a different form.
std::vector<FlightFile::Missing> missing_in(const nlohmann::json& json);

/// Makes the text of such a file from one record after the other.
class FlightText {
 public:
  /// Leaves the record out if its line or the text would become too long.
  void add(const RankRecord& record);
  /// Names the ranks that were left out as missing.
  /// @param head what the first line tells, but for the ranks.
  std::string text(const FlightFile& head) const;

 private:
  std::vector<int> ranks_;
  std::vector<int> left_out_;
  std::string lines_;
};

/// What a rank's file for torch's fr_trace has: a pickle of the rank's line.
std::string torch_pickle(const RankRecord& record);

}  // namespace syncbn::launch

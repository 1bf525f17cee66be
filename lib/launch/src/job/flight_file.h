#pragma once

#include <syncbn/base/clock.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "job/rank_record.h"

namespace syncbn::launch {

/// A file of the flight records of a node's or a job's ranks: lines of JSON. The first line
/// describes the job. Each rank has one line, an object in the form of torch's flight records with
/// additional keys. The last line marks the file as complete.
struct FlightFile {
  /// Upper bound on a file, in bytes: 128 MiB of records and the first line.
  static constexpr size_t kMaxBytes = size_t{132} << 20;

  /// A node whose records are missing from a file of all nodes.
  struct Missing {
    std::string node;        ///< "node 1 (host)"
    std::vector<int> ranks;  ///< its workers
    std::string why;
  };

  std::string job = {};
  int attempt = 0;
  int world_size = 1;
  std::string why = {};               ///< the reason for writing the file
  int64_t unix_ns = base::unix_ns();  ///< the time of writing the file
  std::vector<int> ranks = {};        ///< that the file has, or had before it was cut
  bool has_all_nodes = false;
  std::vector<Missing> missing = {};  ///< only if has_all_nodes
  std::vector<RankRecord> records = {};
  bool is_complete = true;
  size_t damaged_lines = 0;

  void add(RankRecord record);
  std::string text() const;
  /// @param text of a file, perhaps cut or damaged.
  /// @throws base::UserError naming `path` if the first line is not that of a flight file, or a
  ///   line is larger than a record can be.
  static FlightFile of(const std::string& text, const std::string& path);
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FlightFile::Missing, node, ranks, why)
/// @throws nlohmann's exceptions if `json` has a different form.
std::vector<FlightFile::Missing> missing_in(const nlohmann::json& json);

/// Builds the text of such a file, one record at a time.
class FlightText {
 public:
  /// Leaves the record out if its line or the text would become too long.
  void add(const RankRecord& record);
  /// Names the ranks that were left out as missing.
  /// @param head what the first line contains, except the ranks.
  std::string text(const FlightFile& head) const;

 private:
  std::vector<int> ranks_;
  std::vector<int> left_out_;
  std::string lines_;
};

/// The content of a rank's file for torch's fr_trace: the rank's line as a pickle.
std::string torch_pickle(const RankRecord& record);

}  // namespace syncbn::launch

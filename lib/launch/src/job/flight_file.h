#pragma once

#include <syncbn/base/clock.h>

#include <cstddef>
#include <cstdint>
#include <map>
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
    ShownText node;          ///< "node 1 (host)"
    std::vector<int> ranks;  ///< its workers
    ShownText why;
  };

  ShownText job = {};
  int attempt = 0;
  int world_size = 1;
  ShownText why = {};                 ///< the reason for writing the file
  int64_t unix_ns = base::unix_ns();  ///< the time of the records
  std::vector<int> ranks = {};        ///< that a file has, or had before it was cut
  bool has_all_nodes = false;
  std::vector<Missing> missing = {};       ///< only if has_all_nodes
  std::map<int, RankRecord> records = {};  ///< by rank

  /// Leaves out records above the upper bounds on a line and a file, and names them as missing.
  std::string text() const;
  /// @param text of a file, perhaps cut or damaged.
  /// @throws base::UserError naming `path` if the first line is not that of a flight file, or a
  ///   line is larger than a record can be.
  static FlightFile of(const std::string& text, const std::string& path);
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FlightFile::Missing, node, ranks, why)
/// The first line of a file, without its format; the records are not part of it.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FlightFile, job, attempt, world_size, why, unix_ns, ranks,
                                   has_all_nodes, missing)

/// The content of a rank's file for torch's fr_trace: the rank's line as a pickle.
std::string torch_pickle(const RankRecord& record);

/// A rank's share of the flight records that node 0 keeps for a job: 80,000 calls and 64 MiB in
/// total, however many ranks there are.
struct RecordQuota {
  size_t calls;  ///< the latest ones
  size_t bytes;  ///< of a message

  static RecordQuota of(int world_size);
};

/// Leaves out the oldest calls that have ended to meet the quota. Returns false if not even one
/// call fits.
bool shorten(RankRecord& record, const RecordQuota& quota);

}  // namespace syncbn::launch

#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "job/flight_file.h"
#include "job/rank_record.h"

namespace syncbn::launch {

/// A rank's share of the flight records that node 0 keeps for a job: 80,000 calls and 64 MiB in
/// total, however many ranks there are.
struct RecordQuota {
  size_t calls;  ///< the latest ones
  size_t bytes;  ///< of a message

  static RecordQuota of(int world_size);
};

/// json_of() as a message from the rank's launcher to node 0's, for record_in(). Leaves out the
/// oldest calls that have ended to meet the quota; empty if not even one call fits.
std::optional<nlohmann::json> record_message(RankRecord record, const RecordQuota& quota);

/// The flight records of all ranks, as node 0's launcher has received them.
struct JobRecords {
  FlightFile file = {};                      ///< without its records, which are in `messages`
  std::map<int, std::string> messages = {};  ///< from record_message(), by rank; not validated

  /// As a file.
  std::string text() const;
};

}  // namespace syncbn::launch

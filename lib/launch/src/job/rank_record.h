#pragma once

#include <syncbn/base/flight_record.h>
#include <syncbn/base/unique_fd.h>

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/json_messages.h"

namespace syncbn::launch {

/// Ranks of a group as runs of {first, count, step}: in large worlds, groups are mostly rows or
/// columns of a mesh. Another launcher may claim a run of any length, so what it sends stays in
/// this form.
using RankRuns = std::vector<std::array<int, 3>>;
RankRuns rank_runs(const std::vector<int>& ranks);
bool contains(const RankRuns& runs, int rank);
/// The ranks from 0 to kMaxRanks in these runs, at most `max_count`.
std::vector<int> ranks_in(const RankRuns& runs, size_t max_count);

/// A rank's flight record, read from memory that is not trusted and that the rank may be writing
/// to: texts are made printable, and ranks are below kMaxRanks. A call's group may be missing.
struct RankRecord {
  /// In that memory, a group's line takes at least two bytes per rank.
  static constexpr size_t kMaxRanksInGroups = base::FlightLayout::kGroupBytes / 2;

  struct Group {
    std::string name;
    RankRuns ranks;     ///< in the world
    uint64_t last = 0;  ///< the sequence of the latest collective; 0: none
  };
  struct Call {
    uint64_t number = 0;  ///< of all calls of the rank, from 1
    uint64_t sequence = 0;
    uint64_t begin = 0;    ///< CLOCK_MONOTONIC, ns
    uint64_t end = 0;      ///< 0: pending
    uint64_t awaited = 0;  ///< start of a thread's wait for it; 0: no thread waits
    std::vector<int64_t> sizes = {};
    int peer = -1;  ///< -1: a collective
    size_t group = 0;
    base::FlightLayout::State state = base::FlightLayout::kPending;
    std::string kind = {};
    std::string dtype = {};
    std::string name = {};

    bool is_collective() const { return peer < 0; }
    /// "all_reduce of Float [2, 3]".
    std::string describe() const;
  };

  int rank = 0;
  int world_size = 1;
  int pid = 0;
  std::string host = {};
  int64_t unix_ns = 0;  ///< the Unix time at CLOCK_MONOTONIC 0
  std::vector<Group> groups = {};
  std::vector<Call> calls = {};  ///< the latest ones of all groups, in order

  bool has_valid_rank() const { return rank >= 0 && rank < world_size && world_size <= kMaxRanks; }
  /// Unix time in ns of a CLOCK_MONOTONIC; wraps around in damaged records.
  int64_t unix_time(uint64_t monotonic_ns) const {
    return static_cast<int64_t>(static_cast<uint64_t>(unix_ns) + monotonic_ns);
  }
  /// "all_reduce #41 of group 'default_pg'".
  std::string name_of(const Call& call) const;
  /// What it takes in memory.
  size_t bytes() const;
};

/// Without the keys that only torch's tools read; groups have runs of ranks.
void to_json(nlohmann::json& json, const RankRecord& record);
/// Takes a rank's line in a FlightFile as well.
void from_json(const nlohmann::json& json, RankRecord& record);

/// Empty if no rank has written to it.
std::optional<RankRecord> read_rank_record(int fd);

/// The launcher's end of a worker's flight record: memory that lasts as long as this object.
class RankMemory {
 public:
  static constexpr const char* kName = "syncbn-flight";  ///< the memory's name in /proc/PID/fd

  RankMemory() = default;
  /// If the system or a limit allows no memory, returns an object without any, which records
  /// nothing.
  static RankMemory make();

  /// For the worker; -1 without memory.
  int fd() const { return fd_.get(); }

  struct Counts {
    uint64_t started = 0;
    uint64_t ended = 0;
    double own_seconds = 0;  ///< base::FlightLayout::Header::own_until()
    std::string gpu = {};    ///< the GPU that it computes on; "": none
  };
  /// Counts calls; empty if no process writes to the memory now. Takes a microsecond.
  std::optional<Counts> counts() const;
  /// Also after the process has ended.
  std::optional<RankRecord> read() const { return read_rank_record(fd_.get()); }

 private:
  base::UniqueFd fd_;
};

}  // namespace syncbn::launch

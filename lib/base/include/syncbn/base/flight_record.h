#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace syncbn::base {

/// The layout of a flight record: what a rank's collectives were, in memory that outlives the rank.
/// A header, lines about groups, and a ring of the latest calls. All numbers are little-endian, all
/// texts UTF-8 that ends with NUL, and all times CLOCK_MONOTONIC in ns.
struct FlightLayout {
  static constexpr uint32_t kMagic = 0x52464253;  ///< "SBFR"
  static constexpr uint32_t kVersion = 4;
  static constexpr size_t kCalls = 1000;
  static constexpr size_t kGroups = 1024;
  static constexpr size_t kGroupBytes = size_t{64} << 10;

  enum State : uint8_t { kPending = 0, kSucceeded = 1, kFailed = 2 };

  struct Header {
    uint32_t magic;
    uint32_t version;
    int32_t pid;   ///< of the process that writes, or has written; 0: none
    int32_t rank;  ///< in the world
    int32_t world_size;
    uint32_t group_bytes;  ///< of lines about groups
    int64_t unix_ns;       ///< the Unix time at CLOCK_MONOTONIC 0
    uint64_t started;      ///< calls
    uint64_t ended;        ///< calls
    uint64_t own_ns;       ///< as own_until(), up to `own_since`; wraps around below 0
    uint64_t own_since;    ///< since when no thread waits; 0: one does
    char host[64];
    char gpu[32];  ///< the PCI address of the GPU that it computes on; "": none

    /// Time in ns in which no thread has waited for a call, less the time that calls took on a GPU,
    /// up to `now`. Below 0 if calls on a GPU overlapped.
    int64_t own_until(uint64_t now) const {
      return static_cast<int64_t>(own_ns + (own_since == 0 ? 0 : now - own_since));
    }
  };

  struct Call {
    uint64_t number;    ///< of all calls, from 1; call n is at n % kCalls; 0: no call
    uint64_t sequence;  ///< in its group, from 1; sends and recvs are counted apart
    uint64_t begin;
    uint64_t end;      ///< 0: pending
    uint64_t awaited;  ///< since when a thread waits for it; 0: none does
    int64_t sizes[6];  ///< the first dimensions
    int32_t peer;      ///< of a send or recv, in the world; -1 for collectives
    uint16_t group;    ///< the number of its line, from 0
    uint8_t state;
    uint8_t dimensions;
    char kind[32];   ///< as in torch's records, such as "all_reduce"
    char dtype[16];  ///< such as "Float"
    char name[112];  ///< as messages name it, such as "SyncBatchNorm layer 'bn1' …: exchange"
  };

  Header header;
  /// A line for each group: its ranks with commas in between, a blank, its name.
  char groups[kGroupBytes];
  /// By group, the sequence of the latest collective; 0: none. `calls` may have lost it.
  uint64_t last_collectives[kGroups];
  Call calls[kCalls];
};

static_assert(sizeof(FlightLayout::Call) == 256);

/// Writes this process's flight record. Thread-safe.
///
/// A launcher prepares one and names the inherited descriptor in SYNCBN_FLIGHT_FD. The first
/// process that needs it takes it, by a lock, until it ends; a later one then begins it anew.
/// Without a launcher, SYNCBN_FLIGHT_FOLDER may name a folder for files `rank-<N>.flight`. With
/// neither, nothing is recorded.
class FlightRecord {
 public:
  static constexpr const char* kDescriptor = "SYNCBN_FLIGHT_FD";

  /// What is recorded when a call begins.
  struct Call {
    std::string_view kind = {};
    std::string_view dtype = {};
    std::string_view name = {};
    uint64_t sequence = 0;
    int peer = -1;
    size_t group = 0;  ///< from add_group()
    const int64_t* sizes = nullptr;
    size_t dimensions = 0;
  };

  /// The record of this process; null if it has none.
  /// @param rank in the world. It and the size are those of the first caller.
  static std::shared_ptr<FlightRecord> of_process(int rank, int world_size);
  /// The same; null before of_process().
  static std::shared_ptr<FlightRecord> current();

  /// Makes an empty record of a file. Returns false, with errno set, if it cannot be written.
  static bool prepare(int fd);

  /// Takes a prepared record. Null if another process writes to it, or if it is not one.
  static std::shared_ptr<FlightRecord> make(int fd, int rank, int world_size);
  /// Whether the process that has taken the record still runs.
  static bool is_taken(int fd);

  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  size_t add_group(const std::string& name, const std::vector<int>& ranks);
  /// The GPU that this process computes on.
  void set_gpu(const std::string& address);
  /// FlightLayout::Header::own_until() now.
  std::chrono::nanoseconds own_time();
  /// Returns the call's number, for end().
  uint64_t begin(const Call& call);
  /// From now on a thread waits for a call; once for each call.
  void await(uint64_t number);
  /// @param on_gpu how long it took there, waiting for the other ranks included.
  void end(uint64_t number, FlightLayout::State state, bool was_awaited,
           std::chrono::nanoseconds on_gpu = {});
  /// Removes a call that did not start.
  void remove(uint64_t number);

 private:
  FlightRecord(UniqueFd fd, FlightLayout* layout) : fd_(std::move(fd)), layout_(layout) {}
  uint64_t* last_collective(const FlightLayout::Call& entry) const;

  const UniqueFd fd_;  ///< holds the lock
  FlightLayout* const layout_;
  std::mutex mutex_;
  size_t groups_ = 0;
  bool has_all_groups_ = true;  ///< lines of all of them
  uint64_t awaited_ = 0;
};

}  // namespace syncbn::base

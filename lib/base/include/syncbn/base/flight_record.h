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

/// The layout of a flight record: a rank's collectives, in memory that outlives the rank. A header,
/// lines about groups, and a ring of the latest calls. All numbers are little-endian, all texts
/// UTF-8 that ends with NUL, and all times CLOCK_MONOTONIC in ns.
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
    int32_t pid;   ///< of the process that writes or has written the record; 0: none
    int32_t rank;  ///< in the world
    int32_t world_size;
    uint32_t group_bytes;  ///< size of the lines about groups
    int64_t unix_ns;       ///< the Unix time at CLOCK_MONOTONIC 0
    uint64_t started;      ///< calls
    uint64_t ended;        ///< calls
    uint64_t own_ns;       ///< own_until() at `own_since`; wraps around below 0
    uint64_t own_since;    ///< when the last thread stopped waiting; 0: a thread waits
    char host[64];
    char gpu[32];  ///< PCI address of the GPU that the process computes on; "": none

    /// Time in ns up to `now` in which no thread waited for a call, less the time that calls took
    /// on a GPU. Below 0 if calls on a GPU overlapped.
    int64_t own_until(uint64_t now) const {
      return static_cast<int64_t>(own_ns + (own_since == 0 ? 0 : now - own_since));
    }
  };

  struct Call {
    uint64_t number;    ///< of all calls, from 1; call n is at n % kCalls; 0: no call
    uint64_t sequence;  ///< in its group, from 1; sends and recvs have a separate count
    uint64_t begin;
    uint64_t end;      ///< 0: pending
    uint64_t awaited;  ///< when a thread began to wait for it; 0: none has
    int64_t sizes[6];  ///< the first dimensions
    int32_t peer;      ///< of a send or recv, in the world; -1 for collectives
    uint16_t group;    ///< the number of its line, from 0
    uint8_t state;
    uint8_t dimensions;
    char kind[32];   ///< as in torch's records, such as "all_reduce"
    char dtype[16];  ///< such as "Float"
    char name[112];  ///< as in messages, such as "SyncBatchNorm layer 'bn1' …: exchange"
  };

  Header header;
  /// A line for each group: its ranks, separated by commas, a blank, its name.
  char groups[kGroupBytes];
  /// The sequence of each group's latest collective, which `calls` may have lost; 0: none.
  uint64_t last_collectives[kGroups];
  Call calls[kCalls];
};

static_assert(sizeof(FlightLayout::Call) == 256);

/// Writes this process's flight record. Thread-safe.
///
/// A launcher prepares the record and names the inherited descriptor in SYNCBN_FLIGHT_FD. The first
/// process that needs the record locks it until it ends; a later process starts the record afresh.
/// Without a launcher, SYNCBN_FLIGHT_FOLDER may name a folder for files `rank-<N>.flight`. With
/// neither, nothing is recorded.
class FlightRecord {
 public:
  static constexpr const char* kDescriptor = "SYNCBN_FLIGHT_FD";

  /// The facts known when a call begins.
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
  /// @param rank in the world. Only the first call's rank and size count.
  static std::shared_ptr<FlightRecord> of_process(int rank, int world_size);
  /// The record that of_process() returned; null before its first call.
  static std::shared_ptr<FlightRecord> current();

  /// Turns a file into an empty record. Returns false, with errno set, if it cannot be written.
  static bool prepare(int fd);

  /// Opens and locks a prepared record. Null if another process holds the lock, or if the file is
  /// not a record.
  static std::shared_ptr<FlightRecord> make(int fd, int rank, int world_size);
  /// Whether a process that has locked the record still runs.
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
  /// Records that a thread starts to wait for a call. At most once per call.
  void await(uint64_t number);
  /// @param on_gpu how long the call took on the GPU, including the wait for other ranks.
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
  bool has_all_groups_ = true;  ///< whether each group so far has a line
  uint64_t awaited_ = 0;        ///< number of calls that threads wait for
};

}  // namespace syncbn::base

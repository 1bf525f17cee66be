// Memory that the ranks of one communicator share. Ranks are processes or threads of one machine;
// the segment has a name in /dev/shm, which network namespaces share.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_nccl {

constexpr int kMaxRanks = 16;
constexpr size_t kSlotBytes = size_t{256} << 10;  ///< upper bound for one rank in one step
constexpr size_t kMailBytes = size_t{32} << 10;   ///< upper bound for one piece of a send

/// What all ranks of a step must agree on. If they do not, all of them wait forever.
struct Header {
  int32_t kind = 0;
  int32_t type = -1;
  int32_t operation = -1;
  int32_t root = -1;
  uint64_t bytes = 0;

  bool operator==(const Header&) const = default;
};

/// One rank's side of a sequence of steps. In step n a rank waits until all have consumed step
/// n - 1, publishes header and bytes, waits until all have published, and consumes their bytes.
struct Lane {
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> consumed;
  Header header;
};

/// Transfers from one rank to another; holds one piece of one send.
struct Mailbox {
  std::atomic<bool> is_full;
  uint64_t total;  ///< of the whole send
  uint64_t bytes;  ///< of this piece
  std::array<char, kMailBytes> piece;
};

struct Member {
  std::atomic<bool> has_joined;
  std::atomic<bool> has_left;  ///< finalized, destroyed or aborted
  uint64_t host;
  std::array<char, 24> bus_id;
  pid_t process;
};

struct SharedState {
  std::atomic<int> joined;
  std::array<Member, kMaxRanks> members;
  std::array<Lane, kMaxRanks> stream_lanes;  ///< of operations on streams
  std::array<Lane, kMaxRanks> host_lanes;    ///< of calls in which hosts wait for each other
  std::array<std::array<char, 64>, kMaxRanks> notes;
  alignas(64) std::array<std::array<char, kSlotBytes>, kMaxRanks> slots;
  std::array<std::array<Mailbox, kMaxRanks>, kMaxRanks> mail;  ///< [from][to]
};

/// One rank's mapping of a segment. The last rank to join removes the segment's name.
class Segment {
 public:
  /// Creates the segment unless another rank has.
  /// @throws std::system_error
  Segment(std::string name, int rank);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SharedState& state() const { return *state_; }
  void remove_name() const;

  /// Whether the process of a rank that has joined has ended without leaving.
  bool is_dead(int rank) const;

 private:
  const std::string name_;
  const int file_;
  SharedState* state_;
};

}  // namespace fake_nccl

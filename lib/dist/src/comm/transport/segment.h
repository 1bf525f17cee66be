#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace syncbn::dist::detail::shm {

/// Steps alternate between two slots: no rank reaches step n + 2 before this one has left step n.
constexpr size_t kSlots = 2;

/// The beginning of a rank's segment. Only that rank writes to it, except to `sleepers`.
struct Header {
  std::array<uint64_t, 2> nonce;
  /// The number of steps for which this rank has published its part; a futex of the other ranks.
  alignas(64) std::atomic<uint32_t> published;
  /// The number of ranks asleep. Too high after one was killed, which costs only a system call.
  std::atomic<uint32_t> sleepers;
  /// By slot: the call that the step belongs to.
  std::array<std::atomic<uint64_t>, kSlots> tags;
  /// The rank's affinity mask when it made the segment. Linux numbers at most 8192 CPUs.
  std::bitset<8192> cpus;
};

/// The parts of a segment: the header, and for each slot what the rank publishes (input) and what
/// it has computed for the others (result). Equal on all ranks.
class Layout {
 public:
  /// The more ranks, the smaller each segment.
  explicit Layout(int ranks);

  size_t input_bytes() const { return input_bytes_; }
  size_t result_bytes() const { return input_bytes_ / 2; }
  size_t input_at(size_t slot) const;
  size_t result_at(size_t slot) const { return input_at(slot) + input_bytes_; }
  size_t segment_bytes() const { return input_at(kSlots); }

 private:
  size_t input_bytes_;
};

/// Where processes of the same PID namespace find a rank's segment: a memfd, which the kernel frees
/// when the last process that has mapped it ends in any way. It takes no space in /dev/shm.
struct Address {
  std::array<uint64_t, 2> nonce{};
  std::array<char, 40> boot_id{};  ///< of the machine
  pid_t pid = 0;
  int fd = -1;
};

/// A rank's segment, mapped into this process. Move-only.
class Segment {
 public:
  /// Makes this rank's segment and reserves its memory. Empty if there is too little memory.
  static std::optional<Segment> make(const Layout& layout);

  /// Maps another rank's segment. Empty if this process cannot reach it, because the rank is on
  /// another machine, in another container, or another user's.
  static std::optional<Segment> open(const Address& address, const Layout& layout);

  /// Valid only for a segment from make(), and only before close_to_others().
  Address address() const;
  /// After this, no other process can open the segment.
  void close_to_others() { file_.reset(); }

  bool is_open() const { return memory_ != nullptr; }
  Header& header() const { return *reinterpret_cast<Header*>(memory_.get()); }
  std::byte* at(size_t offset) const { return memory_.get() + offset; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* memory) const { ::munmap(memory, bytes); }
  };
  bool map(base::UniqueFd file, size_t bytes);

  std::unique_ptr<std::byte, Unmap> memory_;
  base::UniqueFd file_;
};

}  // namespace syncbn::dist::detail::shm

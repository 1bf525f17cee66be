#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace syncbn::dist::detail::shm {

/// Steps alternate between two slots: nobody can be in the step after the next before this rank has
/// been through with this one.
constexpr size_t kSlots = 2;

/// The beginning of a rank's segment. It writes, the others read, but for `sleepers`.
struct Header {
  std::array<uint64_t, 2> nonce;
  /// The number of steps this rank has put its part of into a slot. The others sleep on it.
  alignas(64) std::atomic<uint32_t> posted;
  /// How many sleep. Too many after one was killed: that costs a system call, no more.
  std::atomic<uint32_t> sleepers;
  /// By slot: which call the step belongs to.
  std::array<std::atomic<uint64_t>, kSlots> tags;
  /// The rank's affinity mask when it made the segment. Linux numbers at most 8192 CPUs.
  std::bitset<8192> cpus;
};

/// How a segment is divided: the header, and for each slot what a rank gives (input), and what it
/// has worked out for the others (result). The same on all ranks.
class Layout {
 public:
  /// Of a group of so many ranks. The more there are, the smaller is each one's segment.
  explicit Layout(int ranks);

  size_t input_bytes() const { return input_bytes_; }
  size_t result_bytes() const { return input_bytes_ / 2; }
  size_t input_at(size_t slot) const;
  size_t result_at(size_t slot) const { return input_at(slot) + input_bytes_; }
  size_t segment_bytes() const { return input_at(kSlots); }

 private:
  size_t input_bytes_;
};

/// Where a rank's segment can be found by processes that share its table of processes. It is
/// memory without a name in any folder: it ends with the last process that has mapped it, however
/// that ends, and /dev/shm is not asked for room.
struct Address {
  std::array<uint64_t, 2> nonce{};
  std::array<char, 40> boot_id{};  ///< of the machine
  pid_t pid = 0;
  int fd = -1;
};

/// A rank's segment, mapped into this process. Move-only.
class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  /// This rank's own, with all its memory: a later access cannot fail. Empty when there is none to
  /// be had.
  static std::optional<Segment> make(const Layout& layout);

  /// That of another rank; empty when this process cannot reach it, which may have all sorts of
  /// reasons: another machine, another container, or another user.
  static std::optional<Segment> open(const Address& address, const Layout& layout);

  /// Of one that make() made, until close_to_others().
  Address address() const;
  /// From here on nobody else can open it.
  void close_to_others() { file_.reset(); }

  bool is_open() const { return memory_ != nullptr; }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  std::byte* at(size_t offset) const { return memory_ + offset; }

 private:
  bool map(base::UniqueFd file, size_t bytes);

  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  base::UniqueFd file_;
};

}  // namespace syncbn::dist::detail::shm

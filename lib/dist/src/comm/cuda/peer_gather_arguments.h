#pragma once

#include <cstddef>
#include <cstdint>

// What the host passes to the kernel that gathers rows through the memory of GPUs. Plain C++,
// because the host's compiler reads it as well.

namespace syncbn::dist::detail::cuda {

/// Upper bound on the ranks of a group that gathers through the memory of its GPUs.
inline constexpr int kMaxPeers = 16;
/// Upper bound on the numbers of a row: the statistics of 4096 channels.
inline constexpr int64_t kMaxPeerRow = 2 * 4096 + 1;
inline constexpr int kPeerThreads = 512;

/// The memory of one rank into which all ranks write their rows. Two slots per rank, used in turn:
/// a rank writes the slot of exchange n once it has all rows of n - 1, which the others send only
/// after they have read those of n - 2.
struct Mailbox {
  struct alignas(128) Slot {
    uint64_t tag = 0;      ///< equal on ranks that make the same call
    unsigned arrived = 0;  ///< the number of the exchange that has a complete row here
    double row[kMaxPeerRow];
  };
  unsigned exchanges = 0;  ///< that its rank has finished; only this rank writes it
  Slot slots[2][kMaxPeers];
};

struct PeerGatherArguments {
  int rank = 0, ranks = 0;
  Mailbox* mailboxes[kMaxPeers] = {};  ///< by rank, at this GPU's addresses
  uint64_t tag = 0;
  const double* row = nullptr;
  int64_t count = 0;                  ///< of the row's numbers
  double* rows = nullptr;             ///< [ranks, count] result
  const unsigned* aborted = nullptr;  ///< in host memory; not 0: do not wait
};

}  // namespace syncbn::dist::detail::cuda

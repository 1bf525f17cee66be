#pragma once

#include "cuda/peer_gather_arguments.h"

#ifndef __CUDACC__
#include "cuda_emulator/device.h"
#endif

namespace syncbn::dist::detail::cuda {

struct PeerGatherShared {
  bool is_aborted;
};

/// Reads a value that another GPU, or the host, may write while this kernel runs.
template <class T>
__device__ __forceinline__ T read_now(const T* address) {
  return *static_cast<const volatile T*>(address);
}

/// Waits until the slot has the row of this exchange. Ignores the row of another call, so that
/// ranks in different calls wait for each other until the PeerMonitor detects the mismatch and
/// aborts.
/// @return false if the group was aborted
__device__ __forceinline__ bool wait_for_row(const PeerGatherArguments& arguments,
                                             const Mailbox::Slot& slot, unsigned exchange) {
  constexpr unsigned kNanoseconds = 100;
  constexpr unsigned kLooks = 64;  // reads of host memory are slower
  for (unsigned looks = 1;; ++looks) {
    if (read_now(&slot.arrived) == exchange && read_now(&slot.tag) == arguments.tag) return true;
    if (looks % kLooks == 0 && read_now(arguments.aborted) != 0) return false;
    __nanosleep(kNanoseconds);
  }
}

/// An all-gather of rows by one block: writes this rank's row to all mailboxes, and waits for the
/// other ranks' rows in its own. Other blocks of this launch may have written the row.
__device__ __forceinline__ void gather_from_peers(const PeerGatherArguments& arguments,
                                                  PeerGatherShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  Mailbox& own = *arguments.mailboxes[arguments.rank];
  const unsigned exchange = own.exchanges + 1;
  if (thread == 0) shared.is_aborted = false;
  for (int peer = 0; peer < arguments.ranks; ++peer) {
    Mailbox::Slot& slot = arguments.mailboxes[peer]->slots[exchange % 2][arguments.rank];
    if (thread == 0) slot.tag = arguments.tag;
    for (int64_t i = thread; i < arguments.count; i += threads) {
      slot.row[i] = read_now(&arguments.row[i]);
    }
  }
  __threadfence_system();
  __syncthreads();
  if (thread < arguments.ranks) {
    Mailbox::Slot& theirs = arguments.mailboxes[thread]->slots[exchange % 2][arguments.rank];
    *static_cast<volatile unsigned*>(&theirs.arrived) = exchange;
    const Mailbox::Slot& slot = own.slots[exchange % 2][thread];
    if (!wait_for_row(arguments, slot, exchange)) shared.is_aborted = true;
    __threadfence_system();
  }
  __syncthreads();
  if (thread == 0) own.exchanges = exchange;
  if (shared.is_aborted) return;
  for (int rank = 0; rank < arguments.ranks; ++rank) {
    const Mailbox::Slot& slot = own.slots[exchange % 2][rank];
    for (int64_t i = thread; i < arguments.count; i += threads) {
      arguments.rows[rank * arguments.count + i] = read_now(&slot.row[i]);
    }
  }
}

}  // namespace syncbn::dist::detail::cuda

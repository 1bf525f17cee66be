// CUDA's device language for a host compiler: the names that kernels under emulator.h use.
#pragma once

#include <vector_types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's.

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace cuda_emulator {

void wait_for_block();
/// May run other threads.
void pause();
/// Waits until the lanes of `mask` are here, then copies the value of lane `source`, at most 8
/// bytes, to `value`.
void exchange(unsigned mask, int source, void* value, size_t bytes);
/// A bit for each lane of `mask` that passed true.
unsigned ballot(unsigned mask, bool value);
int lane();

template <class T>
T from_lane(unsigned mask, T value, int source) {
  exchange(mask, source, &value, sizeof value);
  return value;
}

}  // namespace cuda_emulator

inline void __syncthreads() {
  cuda_emulator::wait_for_block();
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  cuda_emulator::ballot(mask, false);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_emulator::ballot(mask, predicate != 0);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return cuda_emulator::from_lane(mask, value, cuda_emulator::lane() ^ lanes);
}
/// A lane that has no lane `delta` above it keeps its own value.
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int own = cuda_emulator::lane();
  const int source = own + static_cast<int>(delta);
  return cuda_emulator::from_lane(mask, value, source < 32 ? source : own);
}

// One host thread runs all threads of a launch, so every access is atomic and in order.

inline void __threadfence() {
  cuda_emulator::pause();
}
/// Other threads and processes of the host run kernels at the same time.
inline void __threadfence_system() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  cuda_emulator::pause();
}
inline void __nanosleep(unsigned nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  cuda_emulator::pause();
}
template <class T>
T atomicAdd(T* address, T value) {
  cuda_emulator::pause();
  const T before = *address;
  *address += value;
  return before;
}
/// Adds 1, or wraps to 0 at `last`.
inline unsigned atomicInc(unsigned* address, unsigned last) {
  cuda_emulator::pause();
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}

// NOLINTEND(bugprone-reserved-identifier)

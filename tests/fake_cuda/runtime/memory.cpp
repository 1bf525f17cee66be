// Memory and copies. Each device has a range of addresses without access, and an equally large
// range that holds the bytes.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime.h"

namespace fake_cuda {
namespace {

constexpr size_t kPage = size_t{2} << 20;  // CUDA allocates in units of 2 MiB
constexpr size_t kHostPage = 4096;

size_t round_up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

class Memory {
 public:
  Memory() : arenas_(static_cast<size_t>(device_count())) {
    void* const range = ::mmap(nullptr, 2 * all_devices(), PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) std::abort();
    bytes_ = static_cast<char*>(range);
    devices_ = bytes_ + all_devices();
  }

  size_t size_of_device() const { return size_; }

  size_t free_on(int device) {
    const std::lock_guard lock(mutex_);
    return size_ - arena(device).taken;
  }

  /// @return null if the device has too little free memory
  void* allocate(int device, size_t size) {
    const std::lock_guard lock(mutex_);
    Arena& on = arena(device);
    size = round_up(size, kPage);
    if (size > size_ - on.taken) return nullptr;
    const auto offset = gap(device, size);
    if (!offset) return nullptr;
    char* const bytes = bytes_ + static_cast<size_t>(device) * span_ + *offset;
    if (::mprotect(bytes, size, PROT_READ | PROT_WRITE) != 0) return nullptr;
    on.used[*offset] = size;
    on.taken += size;
    // NaN in every floating-point type: shows reads of memory that nothing has written.
    if (lags()) std::memset(bytes, 0xFF, size);
    return bytes + all_devices();
  }

  /// @return false if nothing was allocated at `pointer`
  bool release(void* pointer) {
    const auto device = owner(pointer);
    if (!device) return false;
    const std::lock_guard lock(mutex_);
    Arena& on = arena(*device);
    const auto found = on.used.find(offset_of(*device, pointer));
    if (found == on.used.end()) return false;
    void* const bytes = host(pointer);
    ::madvise(bytes, found->second, MADV_DONTNEED);
    ::mprotect(bytes, found->second, PROT_NONE);
    on.taken -= found->second;
    on.used.erase(found);
    return true;
  }

  std::optional<int> owner(const void* pointer) const {
    const auto* const address = static_cast<const char*>(pointer);
    if (address < devices_ || address >= devices_ + all_devices()) return std::nullopt;
    return static_cast<int>(static_cast<size_t>(address - devices_) / span_);
  }

  void* host(const void* pointer) const {
    auto* const address = static_cast<char*>(const_cast<void*>(pointer));
    return owner(pointer) ? address - all_devices() : address;
  }

  bool pin(void* pointer, size_t size) {
    const std::lock_guard lock(mutex_);
    return pinned_.emplace(static_cast<char*>(pointer), size).second;
  }
  bool unpin(void* pointer) {
    const std::lock_guard lock(mutex_);
    return pinned_.erase(static_cast<char*>(pointer)) > 0;
  }
  bool is_pinned(const void* pointer) {
    const std::lock_guard lock(mutex_);
    auto* const address = static_cast<char*>(const_cast<void*>(pointer));
    auto after = pinned_.upper_bound(address);
    if (after == pinned_.begin()) return false;
    --after;
    return address < after->first + after->second;
  }

 private:
  struct Arena {
    std::map<size_t, size_t> used;  ///< offset and size
    size_t taken = 0;
  };

  /// The first free addresses of a device for `size` bytes.
  std::optional<size_t> gap(int device, size_t size) {
    size_t offset = 0;
    for (const auto& [begin, length] : arena(device).used) {
      if (begin - offset >= size) break;
      offset = begin + length;
    }
    return offset + size <= span_ ? std::optional(offset) : std::nullopt;
  }
  size_t offset_of(int device, const void* pointer) const {
    const char* const begin = devices_ + static_cast<size_t>(device) * span_;
    return static_cast<size_t>(static_cast<const char*>(pointer) - begin);
  }
  Arena& arena(int device) { return arenas_[static_cast<size_t>(device)]; }
  size_t all_devices() const { return arenas_.size() * span_; }

  const size_t size_ = static_cast<size_t>(setting("FAKE_CUDA_MEMORY_MB", 4096)) << 20;
  const size_t span_ = 4 * size_;  // addresses of a device: leaves room for fragmentation
  std::mutex mutex_;
  char* bytes_ = nullptr;
  char* devices_ = nullptr;
  std::vector<Arena> arenas_;
  std::map<char*, size_t> pinned_;
};

Memory& memory() {
  static auto* const memory = new Memory;
  return *memory;
}

/// The device that owns the memory at `pointer`; empty for host memory.
std::optional<int> owner(const void* pointer) {
  return memory().owner(pointer);
}

Count count_of_copy(const void* to, const void* from) {
  if (owner(from)) return owner(to) ? Count::kDeviceToDevice : Count::kDeviceToHost;
  return owner(to) ? Count::kHostToDevice : Count::kHostToHost;
}

bool is_pageable(const void* pointer) {
  return !owner(pointer) && !memory().is_pinned(pointer);
}

/// Copies `rows` rows of `width` bytes in the order of the stream.
/// @param waits whether to return only when the bytes are there
cudaError_t copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                 size_t rows, cudaStream_t handle, bool waits) {
  if (const cudaError_t error = ready(); error != cudaSuccess) return error;
  if (width == 0 || rows == 0) return cudaSuccess;
  const StreamPtr stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  const bool to_pageable = is_pageable(to);
  count(count_of_copy(to, from));
  auto* const target = static_cast<char*>(host(to));
  const auto* source = static_cast<const char*>(host(from));
  std::shared_ptr<std::vector<char>> staged;
  if (is_pageable(from) && !waits) {
    // The driver stages pageable memory: the caller may overwrite it once the call returns.
    const size_t size = (rows - 1) * from_pitch + width;
    staged = std::make_shared<std::vector<char>>(source, source + size);
    source = staged->data();
  }
  const cudaError_t error = enqueue(handle, [=, staged = std::move(staged)] {
    for (size_t row = 0; row < rows; ++row) {
      std::memcpy(target + row * to_pitch, source + row * from_pitch, width);
    }
  });
  if (error != cudaSuccess) return error;
  if (waits || (to_pageable && owner(from))) {
    count(Count::kPageableWaits);
    stream->drain();
  }
  return ready();
}

}  // namespace

void* host(const void* pointer) {
  return memory().host(pointer);
}

}  // namespace fake_cuda

using fake_cuda::fail;
using fake_cuda::memory;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  *pointer = size == 0 ? nullptr : memory().allocate(fake_cuda::current_device(), size);
  return *pointer != nullptr || size == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  if (pointer == nullptr) return cudaSuccess;
  const auto device = fake_cuda::owner(pointer);
  if (!device) return fail(cudaErrorInvalidValue);
  fake_cuda::count(fake_cuda::Count::kDeviceWaits);
  fake_cuda::drain_device(*device);
  return memory().release(pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  *total = memory().size_of_device();
  *free = memory().free_on(fake_cuda::current_device());
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned /*flags*/) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  if (pointer == nullptr || size == 0) return fail(cudaErrorInvalidValue);
  return memory().pin(pointer, size) ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* pointer) {
  return memory().unpin(pointer) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  *pointer =
      std::aligned_alloc(fake_cuda::kHostPage, fake_cuda::round_up(size, fake_cuda::kHostPage));
  if (*pointer == nullptr) return fail(cudaErrorMemoryAllocation);
  const cudaError_t error = cudaHostRegister(*pointer, size, flags);
  if (error != cudaSuccess) std::free(*pointer);
  return error;
}

cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return cudaHostAlloc(pointer, size, 0);
}

cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (!memory().unpin(pointer)) return fail(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  auto* const address = const_cast<void*>(pointer);
  *attributes = {};
  attributes->device = -1;
  if (const auto device = fake_cuda::owner(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = *device;
    attributes->devicePointer = address;
    return cudaSuccess;
  }
  attributes->hostPointer = address;
  if (memory().is_pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = fake_cuda::current_device();
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::copy(to, size, from, size, size, 1, stream, false));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind /*kind*/) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::copy(to, size, from, size, size, 1, nullptr, true));
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind /*kind*/,
                              cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return fail(cudaErrorInvalidValue);
  FAKE_CUDA_RETURN_ERROR(
      fake_cuda::copy(to, to_pitch, from, from_pitch, width, height, stream, false));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  if (size > 0 && !fake_cuda::owner(pointer)) return fail(cudaErrorInvalidValue);
  fake_cuda::count(fake_cuda::Count::kMemsets);
  FAKE_CUDA_RETURN_ERROR(fake_cuda::enqueue(stream, [bytes = fake_cuda::host(pointer), value,
                                                     size] { std::memset(bytes, value, size); }));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  return cudaMemsetAsync(pointer, value, size, nullptr);
}

}  // extern "C"

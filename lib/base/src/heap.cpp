#include <syncbn/base/heap.h>

#include <syncbn/base/env.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace syncbn::base {

#ifdef __linux__
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

/// Where the heap begins that grows by sbrk(); UINTPTR_MAX: there is none.
uintptr_t begin_of_heap() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.ends_with("[heap]")) return std::stoull(line, nullptr, 16);
  }
  return UINTPTR_MAX;
}

/// Of its whole huge pages.
char* end_of_heap() {
  char* const end = static_cast<char*>(::sbrk(0));
  return end - address_of(end) % kHugePage;
}

/// The heap that keep_freed_memory() has seen to: where it begins, and up to where huge pages have
/// been asked for. Without one it begins at the end of all addresses.
std::atomic<uintptr_t> heap_begin = UINTPTR_MAX;
std::atomic<char*> heap_advised = nullptr;

/// Of the whole huge pages between two addresses.
void advise(char* begin, const char* end) {
  begin += (kHugePage - address_of(begin) % kHugePage) % kHugePage;
  const auto bytes = end - begin - static_cast<ptrdiff_t>(address_of(end) % kHugePage);
  if (bytes > 0) ::madvise(begin, static_cast<size_t>(bytes), MADV_HUGEPAGE);
}

/// Has the heap grow by so much, and huge pages asked for it before it is used. What is not used
/// takes addresses, but no memory. Where there is no such room, nothing is lost.
void take_room(size_t bytes) {
  void* const room = std::malloc(bytes);
  if (room == nullptr) return;
  char* const end = end_of_heap();
  char* const advised = heap_advised.exchange(end);
  if (end > advised) advise(advised, end);
  std::free(room);
}

}  // namespace

void advise_huge_pages(void* block, size_t bytes) {
  if (bytes < kHugePage) return;
  char* const begin = static_cast<char*>(block);
  char* const end = end_of_heap();
  if (address_of(begin) < heap_begin || begin >= end) {
    advise(begin, begin + bytes);
    return;
  }
  // Asked for block by block the heap would fall into many mappings, and what lies in between would
  // be made huge later, by copying.
  constexpr size_t kGrowth = size_t{128} << 20;
  if (end > heap_advised) take_room(kGrowth);
}
#else
void advise_huge_pages(void* /*block*/, size_t /*bytes*/) {}
#endif

void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr std::array kUsersOwn = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
                                    "GLIBC_TUNABLES"};
  if (std::ranges::any_of(kUsersOwn, [](const char* name) { return env(name).has_value(); })) {
    return;
  }
  // No mappings for single blocks, which go with them, and no cutting of the heap's free end.
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, -1);
#ifdef __linux__
  constexpr size_t kRoom = size_t{512} << 20;  // for a usual model's tensors
  heap_begin = begin_of_heap();
  heap_advised = end_of_heap();  // earlier pages have been written already
  take_room(kRoom);
#endif
#endif
}

}  // namespace syncbn::base

#include <syncbn/base/heap.h>

#include <malloc.h>
#include <syncbn/base/env.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

namespace syncbn::base {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

/// The start address of the heap that sbrk() grows; UINTPTR_MAX if there is none.
uintptr_t begin_of_heap() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.ends_with("[heap]")) return std::stoull(line, nullptr, 16);
  }
  return UINTPTR_MAX;
}

/// The end of the heap, rounded down to huge pages.
char* end_of_heap() {
  char* const end = static_cast<char*>(::sbrk(0));
  return end - address_of(end) % kHugePage;
}

/// The heap after keep_freed_memory(): its start (UINTPTR_MAX before that call), and the end of the
/// part for which huge pages have been requested.
std::atomic<uintptr_t> heap_begin = UINTPTR_MAX;
std::atomic<char*> heap_advised = nullptr;

/// Requests huge pages for the 2 MiB ranges that lie wholly between two addresses.
void advise(char* begin, const char* end) {
  begin += (kHugePage - address_of(begin) % kHugePage) % kHugePage;
  const auto bytes = end - begin - static_cast<ptrdiff_t>(address_of(end) % kHugePage);
  if (bytes > 0) ::madvise(begin, static_cast<size_t>(bytes), MADV_HUGEPAGE);
}

/// Grows the heap and requests huge pages for the new part before its first use. Unused pages
/// occupy addresses, not memory. Does nothing if the addresses are not available.
void grow_heap(size_t bytes) {
  void* const block = std::malloc(bytes);
  if (block == nullptr) return;
  char* const end = end_of_heap();
  char* const advised = heap_advised.exchange(end);
  if (end > advised) advise(advised, end);
  std::free(block);
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
  // Requests for single blocks would split the heap into many mappings, and the kernel would have
  // to copy the pages in between to make them huge later.
  constexpr size_t kGrowth = size_t{128} << 20;
  if (end > heap_advised) grow_heap(kGrowth);
}

void keep_freed_memory() {
  constexpr std::array kUsersOwn = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
                                    "GLIBC_TUNABLES"};
  if (std::ranges::any_of(kUsersOwn, [](const char* name) { return env(name).has_value(); })) {
    return;
  }
  // No block gets a mapping of its own, which free() would unmap, and free() does not shrink the
  // heap.
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  constexpr size_t kGrowth = size_t{512} << 20;  // enough for the tensors of a common model
  heap_begin = begin_of_heap();
  heap_advised = end_of_heap();  // pages before this address are in use already
  grow_heap(kGrowth);
}

}  // namespace syncbn::base

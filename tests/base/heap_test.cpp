#include <gtest/gtest.h>
#include <syncbn/base/heap.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace syncbn::base {
namespace {

constexpr int64_t kMany = 100;  // a block of 64 MiB has 32 huge pages

int64_t page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// The page faults from allocating, touching and freeing a block repeatedly.
int64_t faults_of_reuse() {
  constexpr size_t kBytes = size_t{64} << 20;  // more than malloc keeps by default
  constexpr int kTimes = 10;
  int64_t before = 0;
  for (int i = 0; i <= kTimes; ++i) {
    if (i == 1) before = page_faults();
    // volatile, or the compiler removes everything.
    void* volatile block = std::malloc(kBytes);
    std::memset(block, i, kBytes);
    std::free(block);
  }
  return page_faults() - before;
}

/// Number and size of the heap's mappings, and the size of those that may have huge pages.
struct Heap {
  int mappings = 0;
  int64_t kib = 0;
  int64_t huge_kib = 0;
};
Heap heap() {
  Heap found;
  std::ifstream smaps("/proc/self/smaps");
  bool is_heap = false;
  int64_t kib = 0;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key.find('-') != std::string::npos && !key.ends_with(':')) {
      is_heap = line.ends_with("[heap]");
      found.mappings += static_cast<int>(is_heap);
    } else if (is_heap && key == "Size:") {
      words >> kib;
      found.kib += kib;
    } else if (is_heap && key == "VmFlags:" && line.find(" hg") != std::string::npos) {
      found.huge_kib += kib;
    }
  }
  return found;
}

// A single test, because its settings persist in this process.
TEST(HeapTest, FreedMemoryComesBackWithoutPageFaultsUnlessTheUserChoseOtherwise) {
  ::setenv("MALLOC_TRIM_THRESHOLD_", "131072", 1);
  keep_freed_memory();
  ::unsetenv("MALLOC_TRIM_THRESHOLD_");
  const int64_t before = faults_of_reuse();
  EXPECT_GT(before, kMany);
  keep_freed_memory();
  EXPECT_LT(faults_of_reuse(), before / 10);

  // Blocks of 3 MiB, every second one with huge pages, as libraries next to each other allocate.
  constexpr size_t kBytes = size_t{3} << 20;
  std::vector<void*> blocks;
  for (int i = 0; i < 300; ++i) {
    blocks.push_back(std::malloc(kBytes));
    if (i % 2 == 0) advise_huge_pages(blocks.back(), kBytes);
  }
  const Heap all = heap();
  for (void* block : blocks) std::free(block);
  EXPECT_GT(all.kib, 300 * 3 << 10);
  EXPECT_LT(all.mappings, 15) << "one for each block would be 150";
  // A kernel without huge pages does not have this flag.
  const bool knows = std::filesystem::exists("/sys/kernel/mm/transparent_hugepage");
  EXPECT_GE(all.huge_kib, knows ? all.kib - (16 << 10) : 0) << "of " << all.kib;
}

}  // namespace
}  // namespace syncbn::base

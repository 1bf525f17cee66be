#include <gtest/gtest.h>
#include <syncbn/base/heap.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>

namespace syncbn::base {
namespace {

constexpr int64_t kMany = 100;  // of huge pages there are 32 in a block

int64_t page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Page faults of allocating, touching and freeing a block again and again.
int64_t faults_of_reuse() {
  constexpr size_t kBytes = size_t{64} << 20;  // above what malloc would keep by itself
  constexpr int kTimes = 10;
  int64_t before = 0;
  for (int i = 0; i <= kTimes; ++i) {
    if (i == 1) before = page_faults();
    // volatile: or the compiler leaves all of it out.
    void* volatile block = std::malloc(kBytes);
    std::memset(block, i, kBytes);
    std::free(block);
  }
  return page_faults() - before;
}

// One test: what it sets stays set in this process.
TEST(HeapTest, FreedMemoryComesBackWithoutPageFaultsUnlessTheUserChoseOtherwise) {
  ::setenv("MALLOC_TRIM_THRESHOLD_", "131072", 1);
  keep_freed_memory();
  ::unsetenv("MALLOC_TRIM_THRESHOLD_");
  const int64_t before = faults_of_reuse();
  EXPECT_GT(before, kMany);
  keep_freed_memory();
  EXPECT_LT(faults_of_reuse(), before / 10);
}

}  // namespace
}  // namespace syncbn::base

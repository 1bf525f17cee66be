// Feeds each file of a corpus to its fuzzer, in builds without libFuzzer.
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace syncbn::test {
namespace {

TEST(SYNCBN_REPLAY_SUITE, TakesEachFileOfItsCorpus) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SYNCBN_CORPUS)) {
    SCOPED_TRACE(entry.path());
    const std::string bytes = base::read_file(entry.path());
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++files;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace syncbn::test

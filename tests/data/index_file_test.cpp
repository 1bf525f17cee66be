#include "index/index_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <string>
#include <vector>

#include <syncbn/base/atomic_file.h>

#include "support/temp_folder.h"

namespace syncbn::data::detail {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

class IndexFileTest : public ::testing::Test {
 protected:
  IndexFileTest() {
    const base::UniqueFd file = open(O_RDWR | O_CREAT);
    IndexWriter writer(file);
    writer.begin(3);
    writer.add_bytes("abc");
    writer.begin(1);
    writer.add(std::span<const int64_t>(std::vector<int64_t>{7, -1}));
    writer.finish(/*fingerprint=*/42);
  }
  base::UniqueFd open(int flags = O_RDONLY) const {
    return base::UniqueFd(::open(path_.c_str(), flags, 0666));
  }
  /// Whether a file with these bytes can be opened as an index.
  bool is_index(const std::string& bytes) const {
    folder_.write("a.index", bytes);
    return MappedIndex::open(open()).has_value();
  }

  const test::TempFolder folder_;
  const std::string path_ = folder_ / "a.index";
};

TEST_F(IndexFileTest, ReadsWhatWasWritten) {
  const auto index = MappedIndex::open(open());
  ASSERT_TRUE(index);
  EXPECT_EQ(index->text(3), "abc");
  EXPECT_THAT(index->array<int64_t>(1), ElementsAre(7, -1));
  EXPECT_EQ(index->text(2), "");
  EXPECT_EQ(index->fingerprint(), 42u);
}

TEST_F(IndexFileTest, SectionsMayBeLargerThanTheBuffer) {
  std::vector<uint32_t> numbers(1'000'000);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i * i);
  const base::UniqueFd file(::memfd_create("test", 0));
  IndexWriter writer(file);
  writer.begin(kKeySection);
  writer.add_bytes("odd");
  writer.begin(5);
  writer.add(std::span<const uint32_t>(numbers));
  writer.begin(6);
  writer.add_bytes(std::string(3'000'001, 'x'));
  writer.finish(0);
  const auto index = MappedIndex::open(file);
  ASSERT_TRUE(index);
  EXPECT_THAT(index->array<uint32_t>(5), ElementsAreArray(numbers));
  EXPECT_EQ(index->text(6), std::string(3'000'001, 'x'));
}

TEST_F(IndexFileTest, DetectsTruncationAndChangedBytes) {
  const std::string whole = base::read_file(path_);
  ASSERT_TRUE(is_index(whole));
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    EXPECT_FALSE(is_index(changed)) << "byte " << at;
    EXPECT_FALSE(is_index(whole.substr(0, at))) << "cut at " << at;
  }
  EXPECT_FALSE(is_index(whole + '\0'));
}

}  // namespace
}  // namespace syncbn::data::detail

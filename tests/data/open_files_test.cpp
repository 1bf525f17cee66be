#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <syncbn/base/error.h>

#include "sets/file_bytes.h"
#include "support/temp_folder.h"

namespace syncbn::data::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class OpenFilesTest : public ::testing::Test {
 protected:
  /// File i contains the number i.
  OpenFiles files(size_t count, size_t max_open) const {
    std::vector<OpenFiles::Named> all;
    for (size_t i = 0; i < count; ++i) {
      const std::filesystem::path path = folder_.write(fmt::format("{}.bin", i), fmt::to_string(i));
      all.push_back({path, stamp_of(path)});
    }
    return OpenFiles(std::move(all), max_open);
  }

  static std::string content(const OpenFiles& files, size_t number) {
    std::vector<uint8_t> bytes;
    const auto file = files.open(number);
    const auto& path = files.path(number);
    read_at(*file, path, 0, size_of_file(*file, path), bytes);
    return {bytes.begin(), bytes.end()};
  }

  /// Number of the folder's files that this process has open.
  int64_t open_now() const {
    int64_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const auto target = std::filesystem::read_symlink(entry.path(), gone);
      if (target.parent_path() == folder_.path()) ++count;
    }
    return count;
  }

  const test::TempFolder folder_;
};

TEST_F(OpenFilesTest, KeepsTheMostRecentlyUsedFilesOpen) {
  const OpenFiles all = files(6, 3);
  EXPECT_EQ(open_now(), 0);
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(content(all, i), fmt::to_string(i));
  EXPECT_EQ(open_now(), 3);
  const int descriptor = all.open(3)->get();
  content(all, 0);
  content(all, 1);
  EXPECT_EQ(all.open(3)->get(), descriptor);
  EXPECT_EQ(open_now(), 3);
}

TEST_F(OpenFilesTest, KeepsAFileOpenWhileItIsHeld) {
  const OpenFiles all = files(3, 1);
  const auto held = all.open(0);
  content(all, 1);
  content(all, 2);
  EXPECT_EQ(open_now(), 2);
  std::vector<uint8_t> bytes;
  read_at(*held, all.path(0), 0, 1, bytes);
  EXPECT_EQ(bytes.front(), '0');
}

TEST_F(OpenFilesTest, ManyThreadsReadTheRightFiles) {
  const OpenFiles all = files(20, 2);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t i = 0; i < 500; ++i) {
        const size_t number = (i * (thread + 1)) % 20;
        if (content(all, number) != fmt::to_string(number)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(open_now(), 2);
}

TEST_F(OpenFilesTest, RefusesAReplacedOrMissingFile) {
  const OpenFiles all = files(3, 1);
  folder_.write("0.bin", "another");
  std::filesystem::remove(folder_ / "1.bin");
  EXPECT_THAT([&] { all.open(0); },
              ThrowsMessage<base::UserError>(AllOf(HasSubstr("0.bin"), HasSubstr("replaced"))));
  EXPECT_THAT([&] { all.open(1); },
              ThrowsMessage<base::UserError>(AllOf(HasSubstr("1.bin"), HasSubstr("No such file"))));
  EXPECT_EQ(content(all, 2), "2");
}

TEST_F(OpenFilesTest, IgnoresANewOwnerOrMode) {
  const OpenFiles all = files(1, 1);
  std::filesystem::permissions(folder_ / "0.bin", std::filesystem::perms::owner_all);
  EXPECT_EQ(content(all, 0), "0");
}

}  // namespace
}  // namespace syncbn::data::detail

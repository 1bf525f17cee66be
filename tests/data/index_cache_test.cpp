#include "index/index_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "support/multiproc.h"
#include "support/temp_folder.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class IndexCacheTest : public ::testing::Test {
 protected:
  /// An index of `content_`, which is current until `content_` changes.
  IndexSource source() {
    return {.name = "test set",
            .key = "key",
            .is_current = [this](const MappedIndex& index) { return index.text(1) == content_; },
            .build = [this](IndexWriter& out) -> uint64_t {
              ++builds_;
              out.begin(1);
              out.add_bytes(content_);
              return 0;
            }};
  }
  std::string open() { return std::string(open_index(source(), options_).text(1)); }

  /// The only file in the cache with this extension.
  fs::path file(const std::string& ending) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(options_.folder)) {
      if (entry.path().string().ends_with(ending)) found.push_back(entry.path());
    }
    return found.size() == 1 ? found.front() : fs::path("none");
  }

  const test::TempFolder folder_;
  IndexCacheOptions options_{.folder = folder_ / "deep/cache"};
  std::string content_ = "first";
  int builds_ = 0;
};

TEST_F(IndexCacheTest, BuildsOnceAndThenReadsTheFile) {
  EXPECT_EQ(open(), "first");
  EXPECT_EQ(open(), "first");
  EXPECT_EQ(builds_, 1);
  EXPECT_TRUE(fs::exists(file(".index")));
}

TEST_F(IndexCacheTest, RebuildsAnIndexThatIsNotCurrent) {
  const MappedIndex before = open_index(source(), options_);
  content_ = "second";
  EXPECT_EQ(open(), "second");
  EXPECT_EQ(builds_, 2);
  EXPECT_EQ(before.text(1), "first") << "who has the old one keeps it";
}

TEST_F(IndexCacheTest, RebuildsAnIndexThatIsDamagedOrOfAnotherSet) {
  open();
  const std::string whole = base::read_file(file(".index"));
  std::string damaged = whole;
  damaged.back() ^= 1;
  for (const std::string& bytes : {damaged, whole.substr(0, whole.size() / 2), std::string()}) {
    std::ofstream(file(".index")) << bytes;
    builds_ = 0;
    EXPECT_EQ(open(), "first");
    EXPECT_EQ(builds_, 1);
  }
  IndexSource other = source();
  other.key = "other set";
  const fs::path name = file(".index");
  open_index(other, options_);
  for (const auto& entry : fs::directory_iterator(options_.folder)) {
    if (entry.path().extension() == ".index" && entry.path() != name) {
      fs::copy_file(entry.path(), name, fs::copy_options::overwrite_existing);
    }
  }
  builds_ = 0;
  open();
  EXPECT_EQ(builds_, 1);
}

TEST_F(IndexCacheTest, AnErrorOfTheBuilderLeavesNoFile) {
  IndexSource failing = source();
  failing.build = [](IndexWriter&) -> uint64_t { throw base::UserError("no data"); };
  EXPECT_THAT([&] { open_index(failing, options_); },
              ThrowsMessage<base::UserError>(HasSubstr("no data")));
  for (const auto& entry : fs::directory_iterator(options_.folder)) {
    EXPECT_THAT(entry.path().string(), EndsWith(".lock"));
  }
  EXPECT_EQ(open(), "first");
}

TEST_F(IndexCacheTest, RemovesTemporaryFilesOfKilledBuilders) {
  open();
  const fs::path left =
      options_.folder / fmt::format(".{}.1234.tmp", file(".index").filename().string());
  std::ofstream(left) << "half";
  content_ = "second";
  open();
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(IndexCacheTest, WithoutALockItKeepsTemporaryFilesOfOthers) {
  open();
  const fs::path index = file(".index");
  const fs::path others = options_.folder / fmt::format(".{}.1234.tmp", index.filename().string());
  std::ofstream(others) << "half";
  fs::remove(file(".lock"));
  fs::create_directory(index.string() + ".lock");  // a folder cannot be opened for writing
  content_ = "second";
  EXPECT_EQ(open(), "second");
  EXPECT_TRUE(fs::exists(others));
}

TEST_F(IndexCacheTest, AFailedRenameFallsBackToMemoryWithoutDelayingOthers) {
  open();
  const fs::path index = file(".index");
  const fs::path lock_path = file(".lock");
  content_ = "second";
  builds_ = 0;
  std::vector<bool> free;
  IndexSource disturbed = source();
  disturbed.build = [&, build = disturbed.build](IndexWriter& out) {
    fs::remove(index);
    fs::create_directory(index);
    const base::UniqueFd lock(::open(lock_path.c_str(), O_RDWR));
    free.push_back(::flock(lock.get(), LOCK_EX | LOCK_NB) == 0);
    return build(out);
  };
  EXPECT_EQ(open_index(disturbed, options_).text(1), "second");
  // The second build is in memory and does not hold the lock.
  EXPECT_THAT(free, ElementsAre(false, true));
}

TEST_F(IndexCacheTest, AFolderThatCannotBeWrittenToIsReportedOnce) {
  std::ofstream(folder_ / "file") << "no folder";
  options_.folder = folder_ / "file";
  IndexSource other = source();
  other.key = "other key";
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(open(), "first");
  EXPECT_EQ(open_index(other, options_).text(1), "first");
  const std::string log = ::testing::internal::GetCapturedStdout();
  const std::string warning = "the index of 'test set' is kept in each process's memory";
  EXPECT_NE(log.find(warning), log.npos) << log;
  EXPECT_EQ(log.find(warning), log.rfind(warning)) << log;
}

TEST_F(IndexCacheTest, ThreadsThatCannotWriteMayOpenIndicesAtOnce) {
  std::ofstream(folder_ / "file") << "no folder";
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      const IndexSource own{.name = "test set",
                            .key = "key",
                            .is_current = [](const MappedIndex&) { return true; },
                            .build =
                                [](IndexWriter& out) {
                                  out.begin(1);
                                  out.add_bytes("text");
                                  return uint64_t{0};
                                }};
      for (int i = 0; i < 500; ++i) {
        IndexCacheOptions options = options_;
        options.folder = folder_ / "file" / fmt::format("{}-{}", thread, i);
        EXPECT_EQ(open_index(own, options).text(1), "text");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(IndexCacheTest, AFailedMappingFallsBackToMemory) {
  open();
  const fs::path index = file(".index");
  fs::remove(index);
  fs::create_directory(index);
  // A folder can be opened but not mapped. On some file systems it has a size, because of its
  // entries.
  for (int i = 0; i < 40; ++i) std::ofstream(index / fmt::format("a file in the folder {}", i));
  const base::UniqueFd folder(::open(index.c_str(), O_RDONLY));
  EXPECT_THAT([&] { MappedIndex::open(folder); },
              ThrowsMessage<IndexFileError>(HasSubstr("cannot map")));
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(open(), "first");
  const std::string log =
      ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr(index.string() + ": cannot map"));
}

TEST_F(IndexCacheTest, AnErrorInTheDataIsNotReportedAsAFileError) {
  IndexSource failing = source();
  failing.build = [&](IndexWriter&) -> uint64_t {
    ++builds_;
    throw base::UnavailableError("a shard cannot be read");
  };
  EXPECT_THAT([&] { open_index(failing, options_); },
              ThrowsMessage<base::UnavailableError>(HasSubstr("a shard cannot be read")));
  EXPECT_EQ(builds_, 1);
}

TEST_F(IndexCacheTest, OtherRanksDoNotWaitForAnExistingFile) {
  open();
  IndexSource replaced = source();
  int looks = 0;
  // The first rank replaces the file while this rank checks the old one.
  replaced.is_current = [&](const MappedIndex& index) {
    if (++looks > 1) return index.text(1) == "second";
    content_ = "second";
    ::setenv("LOCAL_RANK", "0", 1);
    open();
    return false;
  };
  options_.head_start = std::chrono::hours(1);  // longer than any test takes
  ::setenv("LOCAL_RANK", "1", 1);
  EXPECT_EQ(open_index(replaced, options_).text(1), "second");
  ::unsetenv("LOCAL_RANK");
  EXPECT_EQ(builds_, 2);
}

TEST_F(IndexCacheTest, WithoutAWritableFolderItIsBuiltInMemoryWithAWarning) {
  options_.folder = folder_.write("file", "") + "/cache";
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(open(), "first");
  EXPECT_EQ(open(), "first");
  const std::string log =
      ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(builds_, 2);
  EXPECT_THAT(log, AllOf(HasSubstr("index of 'test set'"), HasSubstr("file/cache")));
}

TEST_F(IndexCacheTest, UsesTheFolderThatTheEnvironmentNames) {
  options_.folder.clear();
  ::setenv("XDG_CACHE_HOME", (folder_ / "xdg").c_str(), 1);
  open();
  EXPECT_FALSE(fs::is_empty(folder_ / "xdg/syncbn"));
  ::setenv("XDG_CACHE_HOME", "relative", 1);  // the specification says to ignore relative paths
  ::setenv("HOME", (folder_ / "home").c_str(), 1);
  open();
  EXPECT_FALSE(fs::is_empty(folder_ / "home/.cache/syncbn"));
}

TEST_F(IndexCacheTest, NamesTheProcessThatItWaitedFor) {
  open();
  content_ = "second";
  const base::UniqueFd lock(::open(file(".lock").c_str(), O_RDWR));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  options_.timeout = std::chrono::milliseconds(30);
  EXPECT_THAT([&] { open(); },
              ThrowsMessage<base::UnavailableError>(
                  AllOf(HasSubstr("waited 30 ms"), HasSubstr(fmt::format("process {}", ::getpid())),
                        HasSubstr("'test set'"))));
}

TEST_F(IndexCacheTest, TheFirstRankOfAHostBuildsForAll) {
  // Each rank that builds appends a line.
  const std::string log = folder_.write("log", "");
  test::run_ranks(4, [&](int rank) {
    IndexSource slow = source();
    slow.build = [&, build = slow.build](IndexWriter& out) {
      std::ofstream(log, std::ios::app) << fmt::format("rank {}\n", rank);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the other ranks come meanwhile
      return build(out);
    };
    options_.head_start = std::chrono::seconds(40);
    const MappedIndex index = open_index(slow, options_);
    EXPECT_EQ(index.text(1), "first");
    // The ranks map the same file instead of making copies.
    EXPECT_THAT(base::read_file("/proc/self/maps"), HasSubstr(file(".index").string()));
  });
  EXPECT_EQ(base::read_file(log), "rank 0\n");
}

TEST_F(IndexCacheTest, OtherRanksBuildOnceIfTheFirstIsMissing) {
  const std::string log = folder_.write("log", "");
  options_.head_start = std::chrono::milliseconds(1);
  test::run_ranks(4, [&](int rank) {
    if (rank == 0) return;
    IndexSource noted = source();
    noted.build = [&, build = noted.build](IndexWriter& out) {
      std::ofstream(log, std::ios::app) << "built\n";
      return build(out);
    };
    EXPECT_EQ(open_index(noted, options_).text(1), "first");
  });
  EXPECT_EQ(base::read_file(log), "built\n");
}

TEST_F(IndexCacheTest, ABuilderThatIsKilledIsReplaced) {
  test::run_ranks(1, [&](int) {
    const pid_t child = ::fork();
    if (child == 0) {
      IndexSource dying = source();
      dying.build = [](IndexWriter& out) -> uint64_t {
        out.begin(1);
        ::kill(::getpid(), SIGKILL);
        return 0;
      };
      open_index(dying, options_);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(open(), "first");
    EXPECT_EQ(file(".tmp"), "none");
  });
}

}  // namespace
}  // namespace syncbn::data::detail

#include "output/log_folder.h"

#include <gmock/gmock.h>
#include <stdlib.h>
#include <syncbn/base/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <vector>

#include "support/temp_folder.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

class LogFolderTest : public ::testing::Test {
 protected:
  LogFolderTest() {
    ::setenv("TMPDIR", temp_.path().c_str(), 1);
    options_.nproc_per_node = 5;
  }
  ~LogFolderTest() override { ::unsetenv("TMPDIR"); }

  /// The folder of a run that failed some seconds ago and left a flight record of so many bytes,
  /// which take no space.
  fs::path kept_by_run(int age, uintmax_t bytes) {
    LogFolder folder(options_);
    folder.begin_attempt(0);
    std::ofstream(folder.attempt() / "flight.jsonl").close();
    fs::resize_file(folder.attempt() / "flight.jsonl", bytes);
    fs::last_write_time(folder.path(),
                        fs::file_time_type::clock::now() - std::chrono::seconds(age));
    folder.keep();
    return folder.path();
  }

  const test::TempFolder temp_;
  LaunchOptions options_;
};

TEST_F(LogFolderTest, ReadsTorchsRecordPlainTextAndNothing) {
  LogFolder folder(options_);
  folder.begin_attempt(0);
  std::ofstream(folder.error_file(0))
      << R"({"message": {"message": "ValueError: a", "extraInfo": {}}})";
  std::ofstream(folder.error_file(1)) << R"({"message": "b"})";
  std::ofstream(folder.error_file(2)) << "not json {";
  std::ofstream(folder.error_file(3)) << R"({"message": {"code": 3}})";
  EXPECT_EQ(folder.error_message(0), "ValueError: a");
  EXPECT_EQ(folder.error_message(1), "b");
  EXPECT_EQ(folder.error_message(2), "not json {");
  EXPECT_EQ(folder.error_message(3), R"({"message": {"code": 3}})");
  EXPECT_EQ(folder.error_message(4), "");
}

TEST_F(LogFolderTest, AnErrorFileThatIsNoPlainFileIsNotRead) {
  LogFolder folder(options_);
  folder.begin_attempt(0);
  EXPECT_EQ(folder.error_file(4), folder.attempt() / "error_4.json") << "without logs";
  EXPECT_TRUE(fs::is_empty(folder.attempt())) << "no folders of workers";
  fs::create_symlink(temp_.write("secret", "secret"), folder.error_file(0));
  fs::create_symlink("/dev/zero", folder.error_file(1));
  fs::create_directory(folder.error_file(2));
  ASSERT_EQ(::mkfifo(folder.error_file(3).c_str(), 0600), 0);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(folder.error_message(rank), "") << rank;
}

TEST_F(LogFolderTest, NamesTheFilesOfFormerAttempts) {
  LogFolder folder(options_);
  for (int attempt = 0; attempt < 3; ++attempt) folder.begin_attempt(attempt);
  EXPECT_THAT(folder.former("flight.jsonl"),
              UnorderedElementsAre(folder.path() / "attempt_0/flight.jsonl",
                                   folder.path() / "attempt_1/flight.jsonl"));
}

TEST_F(LogFolderTest, EachAttemptHasItsOwn) {
  options_.redirects.all.err = true;
  LogFolder folder(options_);
  folder.begin_attempt(0);
  EXPECT_EQ(folder.attempt(), folder.path() / "attempt_0");
  std::ofstream(folder.error_file(0)) << "first";
  folder.begin_attempt(1);
  EXPECT_EQ(folder.of_worker(4), folder.path() / "attempt_1/4");
  EXPECT_TRUE(fs::is_directory(folder.of_worker(4)));
  EXPECT_FALSE(fs::exists(folder.of_worker(5)));
  EXPECT_EQ(folder.error_message(0), "");
  EXPECT_TRUE(fs::exists(folder.path() / "attempt_0/0/error.json"));
}

TEST_F(LogFolderTest, RunsThatFailAgainAndAgainKeepTheLatestOnly) {
  LogFolder running(options_);  // the oldest one, which is in use
  running.keep();
  options_.redirects.all.err = true;
  const fs::path logs = LogFolder(options_).path();
  options_.redirects.all.err = false;
  const fs::path of_others = temp_ / "syncbn-launch-source";
  fs::create_directory(of_others);
  fs::last_write_time(of_others, fs::file_time_type::clock::now() - std::chrono::hours(1));
  std::vector<fs::path> kept;
  for (size_t run = 0; run < LogFolder::kMaxKept + 3; ++run) {
    kept.push_back(kept_by_run(1000 - static_cast<int>(run), 1));
  }
  for (size_t run = 0; run < kept.size(); ++run) {
    EXPECT_EQ(fs::exists(kept[run] / "attempt_0/flight.jsonl"), run >= 3) << run;
  }
  EXPECT_TRUE(fs::exists(running.path()) && fs::exists(logs));
  EXPECT_TRUE(fs::exists(of_others));
}

// Flight records of many ranks are large, and TMPDIR may be in memory.
TEST_F(LogFolderTest, RunsThatFailKeepNotMoreThanTheirShareOfTheDisk) {
  const fs::path third = kept_by_run(40, LogFolder::kMaxKeptBytes / 2);
  const fs::path second = kept_by_run(30, LogFolder::kMaxKeptBytes / 2);
  const fs::path first = kept_by_run(20, LogFolder::kMaxKeptBytes / 2);
  EXPECT_TRUE(fs::exists(third));
  const fs::path latest = kept_by_run(10, 1);
  EXPECT_FALSE(fs::exists(third)) << "of the former runs";
  for (const fs::path& one : {second, first, latest}) EXPECT_TRUE(fs::exists(one));
}

TEST_F(LogFolderTest, ATemporaryOneGoesUnlessItHasLogsOrTheErrorsOfARunThatFailed) {
  for (const bool has_logs : {false, true}) {
    options_.redirects.all.err = has_logs;
    for (const bool keeps : {false, true}) {
      for (const bool succeeds : {false, true}) {
        fs::path path;
        {
          LogFolder folder(options_);
          folder.begin_attempt(0);
          EXPECT_EQ(folder.is_wanted(), has_logs);
          path = folder.path();
          if (keeps) folder.keep();
          if (succeeds) folder.release_errors();
        }
        EXPECT_EQ(fs::exists(path), has_logs || (keeps && !succeeds)) << keeps << succeeds;
      }
    }
  }
}

TEST_F(LogFolderTest, LiesInTheFolderThatIsNamedUnderTheRunsId) {
  options_.log_dir = temp_ / "logs";
  options_.run_id = "a/b";
  const fs::path path = LogFolder(options_).path();
  EXPECT_EQ(path.parent_path(), temp_ / "logs");
  EXPECT_THAT(path.filename().string(), StartsWith("a_b_"));
  for (const fs::path& folder : {path, path.parent_path()}) {
    EXPECT_EQ(fs::status(folder).permissions(), fs::perms::owner_all) << folder;
  }
}

TEST_F(LogFolderTest, WhereAFileStandsThereIsNoFolder) {
  options_.log_dir = temp_.write("file", "");
  EXPECT_THAT([&] { LogFolder folder(options_); },
              ThrowsMessage<base::UserError>(HasSubstr(options_.log_dir)));
}

TEST_F(LogFolderTest, DevNullTakesTheLogsAndLeavesNothing) {
  options_.log_dir = "/dev/null";
  {
    LogFolder folder(options_);
    folder.begin_attempt(0);
    EXPECT_EQ(folder.file(folder.of_worker(0), "stdout.log"), "/dev/null");
    EXPECT_FALSE(folder.is_wanted());
  }
  EXPECT_TRUE(temp_.empty());
}

TEST_F(LogFolderTest, TailIsTheLastLines) {
  EXPECT_THAT(LogFolder::tail(temp_.write("log", "a\nb\n\nd"), 3), ElementsAre("b", "", "d"));
  EXPECT_THAT(LogFolder::tail(temp_.write("log", "a\n"), 3), ElementsAre("a"));
  EXPECT_THAT(LogFolder::tail(temp_.write("log", ""), 3), IsEmpty());
  EXPECT_THAT(LogFolder::tail(temp_ / "none", 3), IsEmpty());
}

TEST_F(LogFolderTest, TailOfALargeFileHasWholeLines) {
  const std::string line(40'000, 'x');
  EXPECT_THAT(LogFolder::tail(temp_.write("log", line + "1\n" + line + "2\nend\n"), 3),
              ElementsAre(line + "2", "end"));
}

TEST_F(LogFolderTest, ListsTheFilesThatFormerAttemptsHaveLeft) {
  LogFolder folder(options_);
  for (int attempt = 0; attempt < 3; ++attempt) {
    folder.begin_attempt(attempt);
    std::ofstream(folder.attempt() / "flight.jsonl") << attempt;
  }
  EXPECT_THAT(folder.former("flight.jsonl"),
              UnorderedElementsAre(folder.path() / "attempt_0/flight.jsonl",
                                   folder.path() / "attempt_1/flight.jsonl"));
}

}  // namespace
}  // namespace syncbn::launch

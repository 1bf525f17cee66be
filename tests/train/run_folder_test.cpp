#include "run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>

#include "support/temp_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class RunFolderTest : public ::testing::Test {
 protected:
  const test::TempFolder folder_;
  const fs::path temp_ = folder_.path();
};

TEST_F(RunFolderTest, RefusesAFolderThatHoldsARunUnlessToldWhatToDo) {
  const std::string path = temp_ / "run";
  EXPECT_EQ(RunFolder::choose(path, "x", false, false), path);
  const RunFolder made(path, "a: 1\n", false);
  EXPECT_THROW(RunFolder::choose(path, "x", false, false), base::UserError);
  EXPECT_EQ(RunFolder::choose(path, "x", true, false), path);
  EXPECT_EQ(RunFolder::choose(path, "x", false, true), path);
}

TEST_F(RunFolderTest, TakesAFolderWithOtherFilesAndKeepsThem) {
  base::write_file_atomically(temp_ / "run/notes.txt", "mine");
  const fs::path path = RunFolder::choose(temp_ / "run", "x", false, false);
  const RunFolder made(path, "a: 1\n", false);
  EXPECT_EQ(base::read_file(path / "notes.txt"), "mine");
}

TEST_F(RunFolderTest, IsFoundByTheJobThatStartedIt) {
  const fs::path path = temp_ / "run";
  ::setenv("SYNCBN_JOB_ID", "job-1", 1);
  EXPECT_FALSE(RunFolder::of_job("job-1", path, "x")) << "it never began";
  RunFolder(path, "", false).log_start(1, 0, false);
  EXPECT_EQ(RunFolder::of_job("job-1", path, "x"), path);
  EXPECT_FALSE(RunFolder::of_job("job-2", path, "x")) << "another run's";
  ::setenv("SYNCBN_JOB_ID", "job-2", 1);
  RunFolder(path, "", true).log_start(1, 5, true);
  EXPECT_EQ(RunFolder::of_job("job-2", path, "x"), path);
  EXPECT_FALSE(RunFolder::of_job("job-1", path, "x"));
  ::unsetenv("SYNCBN_JOB_ID");
}

TEST_F(RunFolderTest, StartsANewRunOrResumesOne) {
  for (const char* file : {"log.jsonl", "last.pt", "best.pt", "result.json"}) {
    base::write_file_atomically(temp_ / file, "old\n");
  }
  RunFolder(temp_, "b: 2\n", /*resume=*/true).log_start(2, 7, true);
  EXPECT_THAT(base::read_file(temp_ / "log.jsonl"), ::testing::StartsWith("old\n{"));
  EXPECT_TRUE(fs::exists(temp_ / "best.pt"));
  EXPECT_FALSE(fs::exists(temp_ / "result.json"));
  EXPECT_EQ(base::read_file(temp_ / "config.yaml"), "b: 2\n");
  const RunFolder anew(temp_, "c: 3\n", /*resume=*/false);
  EXPECT_FALSE(fs::exists(temp_ / "last.pt"));
  EXPECT_EQ(base::read_file(temp_ / "log.jsonl"), "");
}

TEST_F(RunFolderTest, RemovesWhatAKilledRunWasWriting) {
  for (const char* file : {".last.pt.123.tmp", ".result.json.4.tmp", ".notes.5.tmp", "last.pt"}) {
    base::write_file_atomically(temp_ / file, "");
  }
  const RunFolder folder(temp_, "", /*resume=*/true);
  EXPECT_FALSE(fs::exists(temp_ / ".last.pt.123.tmp"));
  EXPECT_FALSE(fs::exists(temp_ / ".result.json.4.tmp"));
  EXPECT_TRUE(fs::exists(temp_ / ".notes.5.tmp"));
  EXPECT_TRUE(fs::exists(temp_ / "last.pt"));
}

TEST_F(RunFolderTest, LogsAnEpochAsOneLineOfJson) {
  RunFolder folder(temp_, "", false);
  EpochRecord record;
  record.epoch = 2;
  record.test_accuracy = 0.75;
  record.data_wait_seconds = 0.25;
  record.data_wait_share = 0.5;
  folder.append(RunFolder::line_of(record));
  const auto json = nlohmann::json::parse(base::read_file(temp_ / "log.jsonl"));
  EXPECT_EQ(json["event"], "epoch");
  EXPECT_EQ(json["epoch"], 2);
  EXPECT_EQ(json["test_accuracy"], 0.75);
  EXPECT_FALSE(json.contains("test_loss"));
  EXPECT_EQ(json["data_wait_seconds"], 0.25);
  EXPECT_EQ(json["data_wait_share"], 0.5);

  const EpochRecord read = RunFolder::parse_line(json.dump());
  EXPECT_EQ(read.epoch, 2);
  EXPECT_EQ(read.test_accuracy, 0.75);
  EXPECT_EQ(read.test_loss, std::nullopt);
  EXPECT_EQ(read.data_wait_share, 0.5);
}

TEST_F(RunFolderTest, CompletesALogThatLacksALineOrEndsInAPartOfOne) {
  RunFolder folder(temp_, "", false);
  folder.append("one");
  folder.complete_log("one");
  folder.complete_log("two");
  folder.complete_log("two");
  EXPECT_EQ(base::read_file(temp_ / "log.jsonl"), "one\ntwo\n");
  base::write_file_atomically(temp_ / "log.jsonl", "one\ntw");
  RunFolder(temp_, "", true).complete_log("two");
  EXPECT_EQ(base::read_file(temp_ / "log.jsonl"), "one\ntwo\n");
}

TEST_F(RunFolderTest, ReportsWhyItCannotBeMade) {
  base::write_file_atomically(temp_ / "file", "");
  for (const std::string& name : {std::string("file/run"), std::string(300, 'x')}) {
    const fs::path path = temp_ / name;
    EXPECT_EQ(RunFolder::choose(path, "x", false, false), path);
    try {
      const RunFolder impossible(path, "", false);
      FAIL() << "no error";
    } catch (const base::UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name));
    }
  }
}

}  // namespace
}  // namespace syncbn::train

#include "records/run_folder.h"
#include "records/epoch_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "checkpoints/keepers.h"
#include "checkpoints/resume.h"
#include "records/folder_lock.h"
#include "support/environment_guard.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class RunFolderTest : public ::testing::Test {
 protected:
  const test::TempFolder folder_;
  const fs::path temp_ = folder_.path();
};

TEST_F(RunFolderTest, RefusesAFolderThatHoldsARunUnlessToldWhatToDo) {
  const std::string path = temp_ / "run";
  EXPECT_EQ(run_files::choose(path, "x", false, false), path);
  const RunFolder made(path, "a: 1\n", false);
  EXPECT_THROW(run_files::choose(path, "x", false, false), base::UserError);
  EXPECT_EQ(run_files::choose(path, "x", true, false), path);
  EXPECT_EQ(run_files::choose(path, "x", false, true), path);
}

TEST_F(RunFolderTest, ARunWithoutACheckpointGivesItsFolderToTheNext) {
  const std::string path = temp_ / "run";
  { RunFolder(path, "a: 1\n", false).log_start(1, 0, false); }
  EXPECT_EQ(run_files::choose(path, "x", false, false), path);
  { base::write_file_atomically(RunFolder(path, "a: 2\n", false).last(), "a checkpoint"); }
  EXPECT_THROW(run_files::choose(path, "x", false, false), base::UserError);
}

TEST_F(RunFolderTest, IsOfOneRunAtATime) {
  const fs::path path = temp_ / "run";
  {
    RunFolder first(path, "a: 1\n", false);
    first.log_start(1, 0, false);
    for (const bool resume : {false, true}) {
      EXPECT_THAT([&] { RunFolder(path, "a: 2\n", resume); },
                  ThrowsMessage<base::UserError>(
                      HasSubstr("another process is writing to " + path.string() +
                                "; wait for the end of that run, or choose another run_dir")));
    }
    EXPECT_EQ(base::read_file(path / "config.yaml"), "a: 1\n");
    EXPECT_THAT(base::read_file(path / "log.jsonl"), HasSubstr("start"));
    // The lock of a lost node may remain on a file server.
    ::setenv("SYNCBN_ATTEMPT", "1", 1);
    const RunFolder restarted(path, "a: 3\n", true);
    ::unsetenv("SYNCBN_ATTEMPT");
  }
  const RunFolder next(path, "a: 4\n", true);
}

TEST_F(RunFolderTest, ARunIsResumedFromWhatItHasSavedLast) {
  dist::init_process_group();
  const fs::path path = temp_ / "run";
  Checkpoint checkpoint;
  checkpoint.step = 1;
  base::UniqueFd lock = lock_of_run(path);
  base::write_file_atomically(path / "last.pt", serialize(checkpoint));
  Config config;
  config.run_dir = path;
  config.resume = "auto";
  const Keepers keepers(/*of_each_node=*/false, path);
  auto state = std::async([&] { return find_resume_state(config, "x", keepers); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it waits for the end of the run
  checkpoint.step = 2;
  base::write_file_atomically(path / "last.pt", serialize(checkpoint));
  lock.reset();
  const ResumeState found = state.get();
  EXPECT_EQ(parse_checkpoint(found.checkpoint, "last.pt").step, 2);
  EXPECT_TRUE(is_locked(path));
}

TEST_F(RunFolderTest, RefusesAFolderInWhichAnotherRunHasSavedMeanwhile) {
  const fs::path path = temp_ / "run";
  const base::UniqueFd lock = lock_of_run(path);
  run_files::refuse_if_saved(path);
  for (const char* const file : {"last.pt", "result.json"}) {
    base::write_file_atomically(path / file, "another run's");
    EXPECT_THAT([&] { run_files::refuse_if_saved(path); },
                ThrowsMessage<base::UnavailableError>(HasSubstr(
                    "another run has used " + path.string() + " since this one started")));
    fs::remove(path / file);
  }
}

TEST_F(RunFolderTest, WritesItsLogToNoPipe) {
  const fs::path path = temp_ / "run";
  { RunFolder(path, "a: 1\n", false).log_start(1, 0, false); }
  fs::remove(path / "log.jsonl");
  ASSERT_EQ(::mkfifo((path / "log.jsonl").c_str(), 0600), 0);
  EXPECT_THAT([&] { RunFolder(path, "a: 1\n", true); },
              ThrowsMessage<base::UserError>(HasSubstr("log.jsonl: it is not a regular file")));
}

TEST_F(RunFolderTest, DoesNotReplaceAConfigurationThatNoRunWrote) {
  const fs::path path = temp_ / "mine";
  base::write_file_atomically(path / "config.yaml", "a: 1\n");
  EXPECT_THROW(run_files::choose(path, "x", false, false), base::UserError);
  for (const bool resume : {false, true}) {
    EXPECT_THAT([&] { RunFolder(path, "a: 2\n", resume); },
                ThrowsMessage<base::UserError>(
                    HasSubstr("mine has a config.yaml that no run wrote (there is no log.jsonl); "
                              "choose another folder")));
  }
  EXPECT_EQ(base::read_file(path / "config.yaml"), "a: 1\n");
}

TEST_F(RunFolderTest, NeverRemovesWhatNoRunWrote) {
  for (const char* const file : {"pictures/cat/1.png", "profile/me.txt", "step-3.pt",
                                 "environment.json", "mistakes.csv", "metrics.csv"}) {
    SCOPED_TRACE(file);
    const fs::path path = temp_ / ("of " + fs::path(file).stem().string());
    base::write_file_atomically(path / file, "mine");
    const std::string first = *fs::path(file).begin();
    EXPECT_THAT([&] { RunFolder(path, "a: 1\n", false); },
                ThrowsMessage<base::UserError>(HasSubstr("has a " + first + " that no run wrote")));
    EXPECT_EQ(base::read_file(path / file), "mine");
  }
  // A run's folder may contain other files as well.
  const fs::path path = temp_ / "run";
  const std::string own = path / "pictures/samples-000000000007.png";
  const std::string mine = path / "pictures/cat/1.png";
  RunFolder(path, "a: 1\n", false).log_start(1, 0, false);
  base::write_file_atomically(own, "a run's");
  base::write_file_atomically(mine, "mine");
  const RunFolder anew(path, "a: 1\n", false);
  EXPECT_FALSE(fs::exists(own));
  EXPECT_EQ(base::read_file(mine), "mine");
}

TEST_F(RunFolderTest, TakesAFolderWithOtherFilesOnlyIfToldToAndKeepsThem) {
  const fs::path path = temp_ / "run";
  base::write_file_atomically(path / ".hidden", "");
  EXPECT_EQ(run_files::choose(path, "x", false, false), path);
  base::write_file_atomically(path / "logs/attempt_0/0/stdout.log", "the launcher's");
  {
    const test::Environment logs("TORCHELASTIC_ERROR_FILE", (path / "logs/attempt_0/0/e").string());
    EXPECT_EQ(run_files::choose(path, "x", false, false), path);
  }
  fs::remove_all(path / "logs");
  // The log of another node with --log_dir=run, or of an attempt that failed before it wrote.
  base::write_file_atomically(path / "job_x/attempt_0/0/stdout.log", "the launcher's");
  EXPECT_EQ(run_files::choose(path, "x", false, false), path);
  base::write_file_atomically(path / "notes.txt", "mine");
  EXPECT_THAT([&] { run_files::choose(path, "x", false, false); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("run is not empty and holds no run, but notes.txt; choose another")));
  EXPECT_EQ(run_files::choose(path, "x", false, /*overwrite=*/true), path);
  { const RunFolder made(path, "a: 1\n", false); }
  EXPECT_EQ(base::read_file(path / "notes.txt"), "mine");
  EXPECT_EQ(run_files::choose(path, "x", false, false), path) << "it is a run's now";
}

TEST_F(RunFolderTest, IsFoundByTheJobThatStartedIt) {
  const fs::path path = temp_ / "run";
  ::setenv("SYNCBN_JOB_ID", "job-1", 1);
  EXPECT_FALSE(run_files::of_job("job-1", path, "x")) << "it never began";
  RunFolder(path, "", false).log_start(1, 0, false);
  EXPECT_EQ(run_files::of_job("job-1", path, "x"), path);
  EXPECT_FALSE(run_files::of_job("job-2", path, "x")) << "another run's";
  ::setenv("SYNCBN_JOB_ID", "job-2", 1);
  RunFolder(path, "", true).log_start(1, 5, true);
  EXPECT_EQ(run_files::of_job("job-2", path, "x"), path);
  EXPECT_FALSE(run_files::of_job("job-1", path, "x"));
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

TEST_F(RunFolderTest, HasTheTablesOfTheLastEvaluation) {
  {
    RunFolder folder(temp_, "", /*resume=*/false);
    folder.replace_file("confusion.csv", "first");
    folder.replace_file("confusion.csv", "second");
    folder.replace_file("ema_confusion.csv", "average");
    folder.replace_file("mistakes.csv", "worst");
    folder.replace_file(run_files::kReport, "page");
  }
  folder_.write("mine.csv", "");
  folder_.write(".ema_confusion.csv.7.tmp", "");
  { const RunFolder resumed(temp_, "", /*resume=*/true); }
  EXPECT_EQ(base::read_file(temp_ / "confusion.csv"), "second");
  EXPECT_FALSE(fs::exists(temp_ / ".ema_confusion.csv.7.tmp"));
  const RunFolder other(temp_, "", /*resume=*/false);
  EXPECT_FALSE(fs::exists(temp_ / "confusion.csv"));
  for (const char* file : {"ema_confusion.csv", "mistakes.csv", run_files::kReport}) {
    EXPECT_FALSE(fs::exists(temp_ / file)) << file;
  }
  EXPECT_TRUE(fs::exists(temp_ / "mine.csv"));
}

TEST_F(RunFolderTest, LogsAnEpochAsOneLineOfJson) {
  RunFolder folder(temp_, "", false);
  EpochRecord record;
  record.epoch = 2;
  record.train = {{"loss", 0.5}, {"accuracy", 0.625}};
  record.eval_split = "test";
  record.eval = {{"accuracy", 0.75}};
  record.data_wait_seconds = 0.25;
  record.data_wait_share = 0.5;
  record.memory_bytes = 2e9;
  record.gpu = {.memory_bytes = 3e9, .utilization = 0.875};
  folder.append(line_of(record));
  const auto json = nlohmann::json::parse(base::read_file(temp_ / "log.jsonl"));
  EXPECT_EQ(json["event"], "epoch");
  EXPECT_EQ(json["epoch"], 2);
  EXPECT_EQ(json["test_accuracy"], 0.75);
  EXPECT_FALSE(json.contains("test_loss"));
  EXPECT_EQ(json["data_wait_seconds"], 0.25);
  EXPECT_EQ(json["data_wait_share"], 0.5);
  EXPECT_EQ(json["memory_bytes"], 2e9);
  EXPECT_EQ(json["gpu_memory_bytes"], 3e9);

  const EpochRecord read = parse_line(json.dump());
  EXPECT_EQ(read.epoch, 2);
  EXPECT_THAT(read.train, ::testing::UnorderedElementsAreArray(record.train));
  EXPECT_EQ(read.eval, record.eval);
  EXPECT_EQ(read.eval_split, "test");
  EXPECT_EQ(read.data_wait_share, 0.5);
  EXPECT_EQ(read.memory_bytes, 2e9);
  EXPECT_EQ(read.gpu.value().utilization, 0.875);

  record.gpu->utilization.reset();
  const std::string without_utilization = line_of(record);
  EXPECT_FALSE(nlohmann::json::parse(without_utilization).contains("gpu_utilization"));
  EXPECT_EQ(parse_line(without_utilization).gpu.value().utilization, std::nullopt);
}

TEST_F(RunFolderTest, ReadsALossThatIsNotFinite) {
  EpochRecord record;
  record.train = {{"loss", std::numeric_limits<double>::quiet_NaN()}};
  const EpochRecord read = parse_line(line_of(record));
  EXPECT_TRUE(std::isnan(find(read.train, "loss").value_or(0)));
}

TEST_F(RunFolderTest, LogsEachStepAsJson) {
  constexpr double kThird = 1.0 / 3;
  {
    RunFolder folder(temp_, "", false);
    folder.log_step(6, 2, 0.5, 0.1, 0);
    folder.log_step(7, 2, std::numeric_limits<double>::infinity(), kThird, 1e-6);
  }
  std::istringstream log(base::read_file(temp_ / "log.jsonl"));
  nlohmann::ordered_json first;
  nlohmann::ordered_json second;
  log >> first >> second;
  EXPECT_EQ(first["step"], 6);
  EXPECT_GT(second["time"].get<double>(), 1.7e9);
  second.erase("time");
  const nlohmann::ordered_json wanted = {{"event", "step"}, {"epoch", 2},
                                         {"step", 7},       {"loss", nullptr},
                                         {"lr", kThird},    {"data_wait_seconds", 1e-6}};
  EXPECT_EQ(second, wanted);
}

TEST_F(RunFolderTest, LogsAnEndByAnErrorAboutAFileWhoseNameIsNotUtf8) {
  RunFolder folder(temp_, "", false);
  folder.log_start(1, 0, false);
  folder.log_end("an error: cannot decode 'caf\xe9.png'", 3);
  EXPECT_TRUE(folder.has_end());
  std::istringstream log(base::read_file(temp_ / "log.jsonl"));
  nlohmann::json start;
  nlohmann::json end;
  log >> start >> end;
  EXPECT_EQ(end["reason"], "an error: cannot decode 'caf\\xe9.png'");
}

TEST_F(RunFolderTest, RewindsTheLogToAStep) {
  const std::string start = R"({"event":"start","step":0})";
  const auto epoch = [](int step) {
    return R"({"event":"epoch","step":)" + std::to_string(step) + "}";
  };
  const auto log = [&] { return base::read_file(temp_ / "log.jsonl"); };
  RunFolder folder(temp_, "", false);
  folder.append(start);
  folder.append(epoch(10));
  folder.log_step(15, 2, 0.5, 0.1, 0);
  folder.log_step_time(2, 20, {{.whole = 2, .data = 1}});
  folder.append(epoch(20));
  folder.append(R"({"event":"end","step":25})");
  const std::string whole = log();
  folder.rewind_log(20, 2, epoch(20));
  EXPECT_EQ(log(), whole) << "nothing is later";
  // Later lines are removed, because their steps run again; the line for the run's end stays.
  folder.rewind_log(12, 1, epoch(10));
  EXPECT_EQ(log(), start + "\n" + epoch(10) + "\n" + R"({"event":"end","step":25})" + "\n");
  // The run ended before it wrote the epoch's line, or while it wrote it.
  base::write_file_atomically(temp_ / "log.jsonl", start + "\n" + epoch(10).substr(0, 9));
  folder.rewind_log(10, 1, epoch(10));
  EXPECT_EQ(log(), start + "\n" + epoch(10) + "\n");
  // An editor has removed the last newline.
  base::write_file_atomically(temp_ / "log.jsonl", start + "\n" + epoch(10));
  folder.rewind_log(10, 1, epoch(10));
  folder.append(epoch(20));
  EXPECT_EQ(log(), start + "\n" + epoch(10) + "\n" + epoch(20) + "\n") << "goes to the new file";
  // An epoch that max_steps cut short, and lines of other programs.
  const std::string other = R"({"event":3})"
                            "\n"
                            R"({"event":"step","step":"x"})";
  folder.append(other);
  folder.append(R"({"event":"epoch","step":20,"epoch":3})");
  folder.rewind_log(20, 2, epoch(20));
  EXPECT_EQ(log(), start + "\n" + epoch(10) + "\n" + epoch(20) + "\n" + other + "\n");
  EXPECT_EQ(run_files::of_job("job", temp_, "x"), std::nullopt);
}

TEST_F(RunFolderTest, HasTheNumbersOfTheLogAsATable) {
  const auto table = [&] {
    std::string all;
    std::istringstream rows(base::read_file(temp_ / "metrics.csv"));
    for (std::string row; std::getline(rows, row);) {
      const size_t time = row.find(',') + 1;
      all += row.replace(time, row.find(',', time) - time, "T") + "\n";
    }
    return all;
  };
  const auto epoch = [](const std::string& more) {
    return R"({"event":"epoch","time":1.5,"epoch":1,"step":2,)" + more + "}";
  };
  {
    RunFolder folder(temp_, "", false);
    folder.log_start(1, 0, false);
    folder.log_step(1, 1, std::numeric_limits<double>::quiet_NaN(), 0.1, 0);
    folder.log_step(2, 1, 0.5, 0.1, 0.25);
    folder.append(epoch(R"("lr":0.1,"val_loss":null,"val_iou_a,b":0.75)"));
    folder.log_step(3, 2, 1.0 / 3, 0.1, 0);
    folder.append(epoch(R"("lr":0.1,"late":1)"));
    folder.log_end("SIGTERM", 3);
  }
  const std::string first = R"(event,T,epoch,step,loss,lr,data_wait_seconds,val_loss,"val_iou_a,b"
step,T,1,1,,0.1,0,,
step,T,1,2,0.5,0.1,0.25,,
epoch,T,1,2,,0.1,,,0.75
)";
  const std::string rest = "step,T,2,3,0.3333333333333333,0.1,0,,\nepoch,T,1,2,,0.1,,,\n";
  EXPECT_EQ(table(), first + rest) << "without the key that came late";
  {
    RunFolder resumed(temp_, "", true);
    EXPECT_THAT(table(), HasSubstr("\nepoch,T,1,2,,0.1,,,,1\n")) << "has a column for it now";
    resumed.rewind_log(2, 1, epoch(R"("lr":0.1)"));
    resumed.log_start(1, 2, true);
  }
  {
    RunFolder anew(temp_, "", false);
    anew.log_step(1, 1, 0.5, 0.1, 0);
    EXPECT_FALSE(fs::exists(temp_ / "metrics.csv"));
    anew.log_end("finished", 1);
  }
  EXPECT_EQ(table(), "event,T,epoch,step,loss,lr,data_wait_seconds\nstep,T,1,1,0.5,0.1,0\n");
}

TEST_F(RunFolderTest, BeginsItsTableAnewWhereThatWasRemoved) {
  RunFolder folder(temp_, "a: 1\n", false);
  const auto append = [&](const std::string& fields) {
    fs::remove(temp_ / "metrics.csv");
    folder.append(R"({"event":"epoch","time":1,"epoch":1,"step":2,)" + fields + "}");
    return base::read_file(temp_ / "metrics.csv");
  };
  EXPECT_EQ(append(R"("val_a":1)"), "event,time,epoch,step,val_a\nepoch,1.000,1,2,1\n");
  EXPECT_EQ(append(R"("val_a":3)"), "event,time,epoch,step,val_a\nepoch,1.000,1,2,3\n");
  EXPECT_EQ(append(R"("b":4)"), "event,time,epoch,step,val_a\nepoch,1.000,1,2,\n");
}

TEST_F(RunFolderTest, TensorBoardSeesEachStepOnceAfterAResume) {
  SYNCBN_SKIP_UNLESS(test::python_has("tensorboard"), "tensorboard");
  const auto scalar = [&](const std::string& tag) {
    return test::run_program({test::python(), SYNCBN_SOURCE_DIR "/tests/support/read_events.py",
                              temp_.string(), tag})
        .out;
  };
  data::Image picture(2, 1, 3);
  {
    RunFolder folder(temp_, "optimizer: {type: sgd, lr: 0.5}\nname: '1'\n", false);
    folder.log_start(1, 0, false);
    for (int step = 1; step <= 3; ++step) folder.log_step(step, 1, 0.5 * step, 0.1, 0);
    folder.write_picture("samples", 2, picture);
    folder.write_picture("samples", 3, picture);
    folder.log_histogram("parameters/w", 2,
                         {.min = -1,
                          .max = 3,
                          .count = 3,
                          .sum = 2.5,
                          .sum_of_squares = 10,
                          .limits = {1, 3},
                          .counts = {1, 2}});
    folder.append(R"({"event":"epoch","time":1.5,"epoch":1,"step":3,"train_loss":null})");
  }
  EXPECT_EQ(scalar("step/loss"), "1 0.5\n2 1.0\n3 1.5\n");
  EXPECT_EQ(scalar("train/loss"), "3 nan\n");
  {
    RunFolder resumed(temp_, "optimizer: {type: sgd, lr: 0.5}\n", true);
    resumed.rewind_log(2, 0, "");
    resumed.log_start(1, 2, true);
    for (int step = 3; step <= 4; ++step) resumed.log_step(step, 1, 8.0, 0.1, 0);
    resumed.log_end("finished", 4);
  }
  EXPECT_EQ(scalar("step/loss"), "1 0.5\n2 1.0\n3 8.0\n4 8.0\n");
  EXPECT_EQ(scalar("train/loss"), "");
  EXPECT_EQ(scalar("pictures/samples"), "2 2x1\n");
  EXPECT_EQ(scalar("parameters/w"), "2 -1.0 3.0 3.0 2.5 10.0 [1.0, 3.0] [1.0, 2.0]\n");
  EXPECT_EQ(scalar("hparams"), "name '1'\noptimizer.lr 0.5\noptimizer.type 'sgd'\nstatus 1\n");
  // A run of an earlier version, without event files, has curves as well.
  for (const fs::path& file : EventFile::all_in(temp_)) fs::remove(file);
  { RunFolder(temp_, "", true).log_start(1, 4, true); }
  EXPECT_EQ(scalar("step/loss"), "1 0.5\n2 1.0\n3 8.0\n4 8.0\n");
  { RunFolder(temp_, "", false).log_start(1, 0, false); }
  EXPECT_EQ(scalar("step/loss"), "");
}

// TensorBoard reads the files in the order of their names and never goes back.
TEST_F(RunFolderTest, EventFilesSortByTheirStartsWhateverTheClocksOfTheirHosts) {
  for (const char* first :
       {"events.out.tfevents.1500000000.5.past.1", "events.out.tfevents.9000000000.5.ahead.1",
        "events.out.tfevents.9000000001.a_whole_second", "events.out.tfevents.9000000002"}) {
    folder_.write(first, "");
  }
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<fs::path> before = EventFile::all_in(temp_);
    EventFile(temp_).write();
    std::vector<fs::path> after = EventFile::all_in(temp_);
    ASSERT_EQ(after.size(), before.size() + 1);
    std::ranges::sort(after);
    EXPECT_EQ(std::ranges::count(before, after.back()), 0) << after.back();
  }
}

TEST_F(RunFolderTest, StringsInEventFilesAreUtf8) {
  EventFile file(temp_);
  config::Value config = config::Value::of_map();
  config.set("path", config::Value::of_scalar("data/gr\xfcn/gr\xc3\xbcn"));
  config.set("\xfckey", config::Value::of_scalar("1"));
  file.begin_session(config);
  file.add({.event = "epoch", .values = {{"val_iou_\xfc", 0.5}}});
  file.add_histogram("\xfchistogram", 1, {});
  file.add_image("\xfcimage", 1, data::Image(1, 1, 3), "png");
  file.write();
  const std::string bytes = base::read_file(EventFile::all_in(temp_).at(0));
  for (const char* text :
       {"data/gr\\xfcn/gr\xc3\xbcn", "\\xfckey", "val/iou_\\xfc", "\\xfchistogram", "\\xfcimage"}) {
    EXPECT_THAT(bytes, HasSubstr(text));
  }
}

TEST_F(RunFolderTest, BeginsAnewWhereItWasRemoved) {
  RunFolder folder(temp_ / "run", "a: 1\n", false);
  folder.append("first");
  fs::remove_all(temp_ / "run");
  folder.append("second");
  EXPECT_EQ(base::read_file(temp_ / "run/log.jsonl"), "second\n");
  EXPECT_EQ(base::read_file(temp_ / "run/config.yaml"), "a: 1\n");
  EXPECT_THAT([&] { RunFolder(temp_ / "run", "a: 2\n", true); },
              ThrowsMessage<base::UserError>(HasSubstr("another process is writing to")));
  fs::remove(temp_ / "run/log.jsonl");
  folder.append("third");
  EXPECT_EQ(base::read_file(temp_ / "run/log.jsonl"), "third\n");
  EXPECT_THROW(RunFolder(temp_ / "run", "a: 2\n", true), base::UserError);
  // A lost log is no reason to refuse.
  fs::remove_all(temp_ / "run");
  base::write_file_atomically(temp_ / "run/config.yaml", "a: 1\n");
  base::write_file_atomically(temp_ / "run/last.pt", "a checkpoint");
  const RunFolder resumed(temp_ / "run", "a: 3\n", true);
}

TEST_F(RunFolderTest, ALinkThatLeadsNowhereIsACheckpoint) {
  fs::create_symlink(temp_ / "not mounted/last.pt", temp_ / "last.pt");
  EXPECT_THAT(run_files::checkpoints(temp_), ::testing::ElementsAre(temp_ / "last.pt"));
}

TEST_F(RunFolderTest, AFolderThatCannotBeReadIsNotOneWithoutACheckpoint) {
  fs::create_symlink("loop", temp_ / "loop");
  EXPECT_THAT([&] { run_files::checkpoints(temp_ / "loop"); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("cannot read " + (temp_ / "loop/last.pt").string())));
  EXPECT_THAT(run_files::checkpoints(temp_ / "none"), ::testing::IsEmpty());
  folder_.write("file", "");
  EXPECT_THAT(run_files::checkpoints(temp_ / "file"), ::testing::IsEmpty());
}

TEST_F(RunFolderTest, KeepsTheLastCheckpoints) {
  const RunFolder folder(temp_, "", false);
  std::vector<std::string> names;
  for (int64_t step = 10; step <= 50; step += 10) {
    run_files::rotate(folder.path(), step - 10, /*keep_last=*/3);
    base::write_file_atomically(temp_ / "last.pt", std::to_string(step));
  }
  for (const fs::path& file : run_files::checkpoints(temp_)) {
    names.push_back(file.filename().string() + " " + base::read_file(file));
  }
  EXPECT_THAT(names, ::testing::ElementsAre("last.pt 50", "step-000000000040.pt 40",
                                            "step-000000000030.pt 30"));
  run_files::rotate(folder.path(), 50, /*keep_last=*/1);
  EXPECT_THAT(run_files::checkpoints(temp_), ::testing::ElementsAre(temp_ / "last.pt"));
}

// Resumed from step 20, after a better result at step 30.
TEST_F(RunFolderTest, TheBestCheckpointsAreThoseOfTheStepThatARunResumesFrom) {
  const std::string at_10 = run_files::best_name(10);
  const std::string at_20 = run_files::best_name(20);
  const auto write = [&](const std::string& name, const std::string& text) {
    base::write_file_atomically(temp_ / name, text);
  };
  write(at_10, "10");
  write(at_20, "20");
  write("best.pt", "30");
  run_files::set_aside_after(temp_, 20, temp_ / "last.pt", {{"best.pt", 20}, {at_10, 10}});
  EXPECT_EQ(base::read_file(temp_ / "best.pt"), "20");
  EXPECT_EQ(base::read_file(temp_ / at_10), "10");
  EXPECT_FALSE(fs::exists(temp_ / at_20));
  write(at_20, "20, which was never best");
  run_files::set_aside_after(temp_, 10, temp_ / "last.pt", {{"best.pt", 10}});
  EXPECT_EQ(base::read_file(temp_ / "best.pt"), "10");
  EXPECT_FALSE(fs::exists(temp_ / at_20));
}

TEST_F(RunFolderTest, TheNewestRunIsTheOneThatWroteLast) {
  const fs::path before = fs::current_path();
  fs::current_path(temp_);
  EXPECT_EQ(run_files::newest("", "x"), "runs/x") << "there is none";
  for (const char* run : {"runs/x", "runs/x-2", "runs/x-3"}) {
    const RunFolder made(run, "", false);
    base::write_file_atomically(made.last(), "a checkpoint");
  }
  const auto now = fs::last_write_time("runs/x-3/log.jsonl");
  fs::last_write_time("runs/x-2/log.jsonl", now + std::chrono::seconds(5));
  EXPECT_EQ(run_files::newest("", "x"), "runs/x-2");
  EXPECT_EQ(run_files::newest("mine", "x"), "mine");
  EXPECT_EQ(run_files::of_checkpoint("runs/x-3/last.pt", "", "x"), "runs/x-3");
  EXPECT_EQ(run_files::of_checkpoint("runs/x-3/last.pt", "", "y"), std::nullopt);
  EXPECT_EQ(run_files::of_checkpoint("runs/x-3/last.pt", "runs/x", "x"), std::nullopt);
  fs::current_path(before);
}

TEST_F(RunFolderTest, IsForItsOwnerUnlessItWasThere) {
  fs::create_directory(temp_ / "shared");
  const auto shared = fs::status(temp_ / "shared").permissions();
  for (const char* name : {"run", "shared"}) const RunFolder one(temp_ / name, "", false);
  EXPECT_EQ(fs::status(temp_ / "run").permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(temp_ / "shared").permissions(), shared);
}

TEST_F(RunFolderTest, ReportsWhyItCannotBeMade) {
  base::write_file_atomically(temp_ / "file", "");
  for (const std::string& name : {std::string("file/run"), std::string(300, 'x')}) {
    const fs::path path = temp_ / name;
    EXPECT_EQ(run_files::choose(path, "x", false, false), path);
    EXPECT_THAT(
        test::message_of<base::UserError>([&] { const RunFolder impossible(path, "", false); }),
        HasSubstr(name));
  }
}

}  // namespace
}  // namespace syncbn::train

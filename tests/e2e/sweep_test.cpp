// `train sweep`, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class SweepTest : public ::testing::Test {
 protected:
  Words args(const Words& more) const {
    return Words{"sweep"} +
           digits(sweep_dir_, {"--sync_batchnorm=false", "--data.test_fraction=0.6"}) + more;
  }

  ProgramResult sweep(const Words& more, const Env& env = {}) const {
    return run_train(args(more), env);
  }

  std::string file(const std::string& name) const { return sweep_dir_ + "/" + name; }

  TempFolder folder_;
  std::string sweep_dir_ = folder_ / "sweep";
};

// ctest runs each suite as one entry; this alias splits the file into two, which run in parallel.
using SweepSignalTest = SweepTest;

TEST_F(SweepTest, MakesARunEachAndASecondCallOnlyTheTable) {
  const Words words = {"--nproc_per_node=2", "--epochs=1", "optimizer.lr=0.05,0.1", "seed=3"};
  const ProgramResult first = sweep(words);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("optimizer.lr  best_test_accuracy"));
  EXPECT_THAT(first.err, HasSubstr("sweep: run 2 of 2: optimizer.lr=0.1"));
  for (const std::string lr : {"0.05", "0.1"}) {
    const auto result = result_of(file("optimizer.lr=" + lr));
    EXPECT_EQ(result["world_size"], 2);
    EXPECT_EQ(result["seed"], 3);
  }
  const std::string csv = base::read_file(file("sweep.csv"));
  EXPECT_EQ(count(csv, "finished"), 2) << csv;

  const auto written = fs::last_write_time(file("optimizer.lr=0.1/result.json"));
  const ProgramResult second = sweep(words);
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(count(second.err, "finished before"), 2) << second.err;
  EXPECT_EQ(second.out, first.out);
  EXPECT_EQ(fs::last_write_time(file("optimizer.lr=0.1/result.json")), written);
}

TEST_F(SweepSignalTest, GoesOnAfterASignal) {
  const Words words = {"--epochs=6", "--log_interval=1", "seed=0..1"};
  const auto stopped = start_train(args(words));
  stopped->limit_lead();
  ASSERT_TRUE(stopped->wait_until([&] { return fs::exists(file("seed=0/last.pt")); }));
  stopped->send_signal(SIGTERM);
  const ProgramResult result = stopped->wait();
  EXPECT_EQ(result.exit_code, 85) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the same command goes on"));
  EXPECT_THAT(result.out, HasSubstr("not run"));
  EXPECT_FALSE(fs::exists(file("seed=1")));

  const ProgramResult whole = sweep(words);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_THAT(whole.err, HasSubstr("resumes from " + file("seed=0/last.pt")));
  EXPECT_EQ(result_of(file("seed=0"))["epochs"], 6);
  EXPECT_EQ(result_of(file("seed=1"))["epochs"], 6);
}

// As `timeout` and batch systems send it: the run gets it from them and also from the sweep.
TEST_F(SweepSignalTest, ASignalToAllProcessesSavesTheRun) {
  for (const char* ranks : {"", "--nproc_per_node=2"}) {
    Words words = {"--epochs=100000", "--checkpoint.every=100000ep", "--overwrite", "seed=0..1"};
    if (*ranks != '\0') words.emplace_back(ranks);
    const auto stopped = start_train(args(words));
    ASSERT_TRUE(stopped->wait_until(
        [&] { return count(stopped->out() + stopped->err(), "images/s") > 0; }));
    ::kill(-stopped->pid(), SIGTERM);
    const ProgramResult result = stopped->wait();
    EXPECT_EQ(result.exit_code, 85) << result.err;
    EXPECT_THAT(result.out + result.err, HasSubstr("W stopped by SIG"));
    EXPECT_THAT(result.err, HasSubstr("the same command goes on, without --overwrite"));
  }
}

TEST_F(SweepSignalTest, IgnoresWhatWasIgnoredBefore) {
  std::string command = "trap '' HUP CHLD; exec " + program("train");
  for (const std::string& word : args({"--epochs=2", "seed=0..1"})) command += " '" + word + "'";
  Program nohup({"/bin/sh", "-c", command});
  ASSERT_TRUE(nohup.wait_until([&] { return count(nohup.err(), "run 1 of 2") > 0; }));
  nohup.send_signal(SIGHUP);
  const ProgramResult result = nohup.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(fs::exists(file("seed=1/result.json")));
}

TEST_F(SweepTest, RunsMoreEpochsOfFinishedRuns) {
  ASSERT_EQ(sweep({"--epochs=1", "seed=0..1"}).exit_code, 0);
  const ProgramResult longer =
      sweep({"--epochs=2", "--schedule.type=constant", "seed=0..1", "--overwrite"});
  ASSERT_EQ(longer.exit_code, 0) << longer.err;
  const ProgramResult longest = sweep({"--epochs=3", "--schedule.type=constant", "seed=0..1"});
  EXPECT_EQ(longest.exit_code, 0) << longest.err;
  EXPECT_THAT(longest.err, Not(HasSubstr("finished before")));
  EXPECT_EQ(result_of(file("seed=1"))["epochs"], 3);
}

TEST_F(SweepTest, ARunThatFailsDoesNotEndTheOthers) {
  const ProgramResult result = sweep({"--epochs=2", "--on_nan=stop", "optimizer.lr=1e6,0.1"});
  EXPECT_EQ(result.exit_code, 75) << result.err;
  EXPECT_THAT(result.err, HasSubstr("optimizer.lr=1e6 failed with 75; the sweep goes on"));
  EXPECT_THAT(result.out, ContainsRegex("0\\.1 .* finished\n +1e6 .*failed \\(75\\)"));
}

TEST_F(SweepTest, DamagedFilesOfARunDoNotEndTheOthers) {
  const Words words = {"--epochs=1", "seed=0..1"};
  ASSERT_EQ(sweep(words).exit_code, 0);
  fs::remove(file("seed=0/result.json"));
  fs::remove(file("seed=1/result.json"));
  folder_.write("sweep/seed=0/last.pt", "junk");
  const ProgramResult result = sweep(words);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("seed=0 failed with 2; the sweep goes on"));
  EXPECT_TRUE(fs::exists(file("seed=1/result.json")));
  folder_.write("sweep/seed=0/config.yaml", "");
  const ProgramResult damaged = sweep(words);
  EXPECT_EQ(damaged.exit_code, 2);
  EXPECT_THAT(damaged.err, HasSubstr("seed=0 is damaged; remove that folder"));
}

TEST_F(SweepTest, MistakesAreReportedOnceBeforeTheFirstRun) {
  struct Case {
    Words words;
    std::string message;
  };
  for (const Case& bad : std::vector<Case>{
           {{"optimizer.lrate=1,2", "seed=0..5"}, "unknown key 'optimizer.lrate'"},
           {{"optimizer.lr=0.1,-1", "epochs=0,1"}, "optimizer.lr: must be above 0"},
           {{"--nnodes=2", "seed=0..5"}, "sweep: --nnodes is not possible"},
           {{"--bind=cores", "seed=0..5"}, "sweep: --bind needs --nproc_per_node=N as well"},
           {{"seed=1,01", "optimizer.lr=0.1"}, "sweep: seed=1 and seed=01 are the same run"},
           {{"--resume=a.pt", "seed=0..5"}, "sweep: resume: each run of a sweep resumes its own"},
           {{"--dry_run", "seed=0..5"}, "--dry_run: only for train"},
           {{"seed=5"}, "sweep: no key has several values"}}) {
    const ProgramResult result = sweep(bad.words);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(count(result.err, bad.message), 1) << result.err;
    EXPECT_EQ(result.out, "");
  }
  const ProgramResult rank = sweep({"seed=0..1"}, rank_env(0, 1, 29500));
  EXPECT_EQ(rank.exit_code, 2);
  EXPECT_THAT(rank.err, HasSubstr("RANK is set"));
  const ProgramResult ranks = launch_train(2, args({"seed=0..1"}));
  EXPECT_EQ(ranks.exit_code, 2);
  EXPECT_EQ(count(ranks.out + ranks.err, "RANK is set"), 1) << ranks.err;
  const ProgramResult piped =
      run_program({"bash", "-c", "\"$0\" sweep --config <(cat \"$1\") --run_dir \"$2\" seed=0..1",
                   program("train"), shipped_config("digits.yaml"), sweep_dir_});
  EXPECT_EQ(piped.exit_code, 2) << piped.err;
  EXPECT_EQ(count(piped.err, "a pipe can be read only once; name a file"), 1) << piped.err;
  EXPECT_FALSE(fs::exists(sweep_dir_));
}

TEST_F(SweepTest, RunsWithOtherSettingsAreLeftAlone) {
  ASSERT_EQ(sweep({"--epochs=1", "seed=0..1"}).exit_code, 0);
  const std::string before = base::read_file(file("seed=0/result.json"));
  const ProgramResult result = sweep({"--epochs=1", "--optimizer.lr=0.3", "seed=0..1"});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("seed=0 holds a run with other settings: now optimizer.lr"));
  EXPECT_EQ(base::read_file(file("seed=0/result.json")), before);
}

}  // namespace
}  // namespace syncbn::test

#include <ATen/Functions.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/train/checkpoint.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "e2e/log_lines.h"
#include "e2e/quiet_exits.h"
#include "e2e/train_program.h"
#include "launch/launcher.h"
#include "support/multiproc.h"
#include "support/once.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;
using train::Checkpoint;

/// Halves the training samples: short epochs suffice to test where an interrupted run continues.
const std::string kHalf = "--data.test_fraction=0.6";
const std::string kAll = "--data.test_fraction=0.2";
constexpr int64_t kDigits = 1442;  // number of all training samples

class ResumeTest : public ::testing::Test {
 protected:
  /// Options of a run in the folder `name`.
  Words args(const std::string& name, const Words& more = {}) const {
    return digits(folder_ / name, {"--schedule", "step", "--epochs", "4", kHalf}) + more;
  }

  /// The lines of an event in the log of the run in the folder `name`.
  std::vector<nlohmann::json> log_lines(const std::string& name, const std::string& event) const {
    return log_of(folder_ / name, event);
  }

  /// Makes a finished run of one epoch in the folder `run`. The first of so many ranks trains; the
  /// others are copies.
  void make_run(int ranks) const {
    const auto trained = once(fmt::format("of-{}-ranks", ranks), [&](const std::string& path) {
      run_ranks_of_train(ranks, args(path, {"--epochs=1"}));
    });
    std::filesystem::copy(trained, folder_ / "run", std::filesystem::copy_options::recursive);
  }

  TempFolder folder_;
};

// ctest runs each suite as one entry; these aliases split the file so that they run in parallel.
using ResumeRestartTest = ResumeTest;
using ResumeRefusalTest = ResumeTest;

TEST_F(ResumeTest, SaysWhichBatchSizeKeepsTheSamplesOfAStep) {
  run_ranks_of_train(2, args("run", {"--max_steps=2", "--sampler=distributed"}));
  const auto resumed =
      run_train(args("run", {"--max_steps=3", "--resume=auto", "--sampler=distributed"}));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(
      resumed.err,
      HasSubstr("is of 2 ranks and this run has 1: it continues, but not bit for bit, and a "
                "step has 8 samples in place of 16; batch_size=16 keeps their number"));
}

// Without --resume: a restart by the launcher implies it.
TEST_F(ResumeRestartTest, GoesOnWhereTheAttemptBeforeTheRestartWas) {
  run_ranks_of_train(2, args("whole"));
  const Words words{
      program("syncbn-launch"), "--standalone", "--nproc_per_node=2", "--max_restarts=1", "sh",
      "-c",
      // Two epochs, then a failure.
      R"([ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec "$0" "$@"; "$0" "$@" --epochs=2; exit 1)",
      program("train")};
  const auto result = run_program(words + args("parts"), {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  expect_same_run(checkpoint_of(folder_ / "whole/last.pt"),
                  checkpoint_of(folder_ / "parts/last.pt"));
}

// The learning rate does not change the network, so the mean loss of an epoch identifies its
// samples.
TEST_F(ResumeRestartTest, GoesOnWithMoreAndFewerNodesEachSampleOnceAndTheSameGlobalBatch) {
  constexpr int64_t kBatch = 14;
  constexpr int64_t kSteps = kDigits / kBatch;
  static_assert(kDigits % kBatch == 0);
  const Words options{kAll,
                      "--epochs=4",
                      "--batch_size=null",
                      fmt::format("--global_batch_size={}", kBatch),
                      "--sampler=distributed",
                      "--optimizer.lr=1e-12",
                      "--checkpoint.every=20step",
                      "--log_interval=1"};
  run_ranks_of_train(1, args("whole", options));
  const std::string endpoint = fmt::format("--rdzv_endpoint=127.0.0.1:{}", free_port());
  const auto node = [&](bool leads) {
    const Words words{program("syncbn-launch"),
                      "--nnodes=1:2",
                      "--rdzv_backend=c10d",
                      endpoint,
                      fmt::format("--rdzv_conf=last_call_timeout=1,is_host={}", leads),
                      "train"};
    return std::make_unique<Program>(words + args("run", options),
                                     RunProgramOptions{.env = {{"OMP_NUM_THREADS", "1"}}});
  };
  const auto lead = node(true);
  lead->limit_lead();
  ASSERT_TRUE(lead->wait_for_err("step 40/"));
  // Otherwise the run may be over before the guest has started.
  const pid_t worker = children_of(keeper_of(lead->pid())).at(0);
  ::kill(worker, SIGSTOP);
  const auto guest = node(false);
  const std::string has_joined = "is of 1 rank and this run has 2";
  ASSERT_TRUE(lead->wait_for_err("has joined"));
  ::kill(worker, SIGCONT);
  ASSERT_TRUE(lead->wait_for_err(has_joined)) << lead->err();
  ASSERT_TRUE(lead->wait_until([&] {  // for a checkpoint of both
    const std::string err = lead->err();
    return count(err.substr(err.find(has_joined)), "I step ") > 40;
  })) << lead->err();
  guest->send_signal(SIGKILL);
  const auto result = lead->wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("is of 2 ranks and this run has 1"));
  const auto record = result_of(folder_ / "run");
  EXPECT_EQ(record["world_size"], 1);
  const auto whole = log_lines("whole", "epoch");
  const auto parts = log_lines("run", "epoch");
  ASSERT_EQ(parts.size(), 4);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i]["step"], static_cast<int64_t>(i + 1) * kSteps);
    // One wrong sample would change it by about 1e-4.
    EXPECT_NEAR(parts[i]["train_loss"], whole[i]["train_loss"], 5e-6) << "epoch " << i + 1;
  }
}

class RecoveryTest : public ::testing::TestWithParam<const char*> {};

// Failures before and after the group is formed. bench/recovery runs many more.
TEST_P(RecoveryTest, TakesOneRestart) {
  const auto result =
      run_program({SYNCBN_SOURCE_DIR "/bench/recovery", "--runs=2", "--launcher",
                   program("syncbn-launch"), "--train", program("train"), "--only", GetParam()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 of 2"));
}

INSTANTIATE_TEST_SUITE_P(Kind, RecoveryTest, ::testing::Values("static/c++", "standalone/c++"));

TEST_F(ResumeTest, GoesOnAfterASignalInTheMiddleOfAnEpoch) {
  run_ranks_of_train(2, args("whole"));
  auto ranks = start_ranks(2, args("parts", {"--log_interval=1"}));
  ranks[0]->limit_lead();
  ASSERT_TRUE(ranks[0]->wait_until([&] { return count(ranks[0]->err(), "step 65/") > 0; }));
  // Only one rank gets the signal: the vote stops all ranks.
  ranks[1]->send_signal(SIGTERM);
  const auto results = wait_for(ranks);
  for (const ProgramResult& result : results) {
    EXPECT_EQ(result.exit_code, base::kExitPreempted) << result.err;
  }
  EXPECT_EQ(count(results[0].err, "stopped by SIGTERM"), 1) << results[0].err;
  const std::string saved = folder_ / "parts/last.pt";
  EXPECT_THAT(results[0].err, HasSubstr(saved + " has the run; to resume: "));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "parts/result.json"));
  run_ranks_of_train(2, args("parts", {"--resume", folder_ / "parts"}));
  ASSERT_FALSE(HasFailure());
  expect_same_run(checkpoint_of(folder_ / "whole/last.pt"),
                  checkpoint_of(folder_ / "parts/last.pt"));
}

// As SLURM announces the end of a job's time. Restarts are left, but would not help.
TEST_F(ResumeRestartTest, SavesAndLeavesWhenTheLauncherForwardsAUserSignal) {
  const Words words{program("syncbn-launch"), "--standalone", "--nproc_per_node=2",
                    "--max_restarts=3", "train"};
  Program job(words + args("run", {"--log_interval=1", "--epochs=1000"}),
              {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_TRUE(job.wait_until([&] { return count(job.err(), "step 20/") > 0; })) << job.err();
  job.send_signal(SIGUSR1);
  const auto result = job.wait();
  EXPECT_EQ(result.exit_code, base::kExitPreempted) << result.err;
  EXPECT_EQ(count(result.err, "stopped by SIGUSR1 after step"), 1) << result.err;
  EXPECT_THAT(result.err, HasSubstr("exited with 85 (asked to stop, it has saved what there was"));
  EXPECT_GE(checkpoint_of(folder_ / "run/last.pt").step, 20);
}

// max_steps causes evaluations that another run does not make. They must not change the run.
TEST_F(ResumeTest, GoesOnAfterMaxStepsAsIfItHadNotStopped) {
  const Words options = {"--schedule={type: plateau, patience: 0, threshold: 0.5}",
                         "--eval_interval=2",
                         "--early_stop.patience=2",
                         "--early_stop.min_delta=0.5",
                         "--checkpoint.keep_best.count=2",
                         "--sync_batchnorm=false",
                         "--distribute_bn=none",
                         "--ddp.broadcast_buffers=false"};
  run_ranks_of_train(2, args("whole", options));
  const int64_t steps = checkpoint_of(folder_ / "whole/last.pt").step;
  // In the middle of an epoch, and after an epoch that is not evaluated otherwise.
  for (const int64_t limit : {steps / 4, steps / 4 + 10, steps / 2 + 20, steps}) {
    const Words more = {"--resume=auto", fmt::format("--max_steps={}", limit)};
    run_ranks_of_train(2, args("parts", options + more));
    EXPECT_EQ(result_of(folder_ / "parts")["steps"], limit);
    EXPECT_GT(result_of(folder_ / "parts")["test_accuracy"], 0);
  }
  const Checkpoint whole = checkpoint_of(folder_ / "whole/last.pt");
  const Checkpoint parts = checkpoint_of(folder_ / "parts/last.pt");
  expect_same_run(whole, parts);
  EXPECT_EQ(whole.stale_evaluations, parts.stale_evaluations);
  EXPECT_EQ(whole.improved_to, parts.improved_to);
  ASSERT_EQ(whole.best.size(), parts.best.size());
  for (size_t i = 0; i < whole.best.size(); ++i) {
    EXPECT_EQ(whole.best[i].step, parts.best[i].step);
    EXPECT_EQ(whole.best[i].value, parts.best[i].value);
  }
  ASSERT_EQ(whole.rank_buffers.size(), 2U);
  EXPECT_FALSE(at::equal(whole.rank_buffers[0], whole.rank_buffers[1]));
  EXPECT_TRUE(at::equal(whole.rank_buffers[1], parts.rank_buffers[1]));
  EXPECT_EQ(log_lines("parts", "epoch").size(), 4U);
  std::set<std::string> files[2];
  for (const char* run : {"whole", "parts"}) {
    for (const auto& file : std::filesystem::directory_iterator(folder_ / run)) {
      // The name of an event file contains the time at which it was begun.
      const std::string name = file.path().filename();
      files[run[0] == 'w'].insert(name.starts_with("events.out.tfevents.") ? "events" : name);
    }
  }
  EXPECT_EQ(files[0], files[1]);
  for (const std::string& file : files[0]) {
    if (!file.starts_with("best")) continue;
    SCOPED_TRACE(file);
    expect_same_run(checkpoint_of(folder_ / ("whole/" + file)),
                    checkpoint_of(folder_ / ("parts/" + file)));
  }
}

// The state of a run that was killed during its last evaluation.
TEST_F(ResumeTest, EvaluatesAfterMaxStepsWhereTheRunWasKilledBefore) {
  const Words options = {"--eval_interval=5", "--max_steps=100"};
  ASSERT_EQ(run_train(args("run", options)).exit_code, 0);
  const auto before = result_of(folder_ / "run");
  std::filesystem::remove(folder_ / "run/result.json");
  const auto resumed = run_train(args("run", options + Words{"--resume=auto"}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  const auto lines = log_lines("run", "epoch");
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_FALSE(lines[0].contains("test_accuracy"));
  EXPECT_EQ(lines[1]["step"], 100);
  const auto after = result_of(folder_ / "run");
  for (const char* key : {"train_loss", "test_accuracy", "best_test_accuracy", "best_epoch"}) {
    EXPECT_EQ(after[key], before[key]) << key;
  }
}

TEST_F(ResumeTest, KeepsTheLearningRateWithAnotherGlobalBatch) {
  const Words options = {kAll, "--schedule=cosine", "--sampler=distributed"};
  run_ranks_of_train(1, args("whole", options));
  auto stopped = start_ranks(1, args("parts", options + Words{"--log_interval=1"}));
  stopped[0]->limit_lead();
  // An epoch has 181 steps.
  ASSERT_TRUE(stopped[0]->wait_until([&] { return count(stopped[0]->err(), "step 270/") > 0; }));
  stopped[0]->send_signal(SIGTERM);
  wait_for(stopped);
  run_ranks_of_train(2, args("parts", options + Words{"--resume=auto"}));
  const auto whole = log_lines("whole", "epoch");
  const auto parts = log_lines("parts", "epoch");
  ASSERT_EQ(whole.size(), 4U);
  ASSERT_EQ(parts.size(), 4U);
  for (size_t epoch = 0; epoch < 4; ++epoch) {
    // The last step of an epoch is at most one step of two ranks away from the epoch's end.
    EXPECT_NEAR(parts[epoch]["lr"], whole[epoch]["lr"], 0.001) << "epoch " << epoch + 1;
  }
  EXPECT_LT(parts[3]["step"], whole[3]["step"]);
}

TEST_F(ResumeTest, WarnsWhereMoreEpochsRaiseTheLearningRate) {
  ASSERT_EQ(run_train(args("run", {"--epochs=2", "--schedule=cosine"})).exit_code, 0);
  const auto longer =
      launch_train(2, args("run", {"--epochs=4", "--schedule=cosine", "--resume=auto"}));
  EXPECT_EQ(longer.exit_code, 0) << longer.err;
  EXPECT_EQ(count(longer.out + longer.err, "the learning rate continues at 0.05, where "), 1)
      << longer.out << longer.err;
}

TEST_F(ResumeRefusalTest, AFinishedRunIsLeftAsItIs) {
  make_run(1);
  const std::string result_json = base::read_file(folder_ / "run/result.json");
  const std::string log = base::read_file(folder_ / "run/log.jsonl");
  const auto again = launch_train(2, args("run", {"--epochs=1", "--resume=auto"}));
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out + again.err,
              HasSubstr("last.pt is at the end of epoch 1 of 1; to train on, raise epochs"));
  EXPECT_EQ(base::read_file(folder_ / "run/result.json"), result_json);
  EXPECT_EQ(base::read_file(folder_ / "run/log.jsonl"), log);
  expect_mistake(
      launch_train(2, args("other", {"--epochs=1", "--resume", folder_ / "run/last.pt"})),
      "is at the end of epoch 1 of 1; to train on, raise epochs");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "other"));
}

TEST_F(ResumeRefusalTest, ARunDoesNotEndBeforeWhereItIs) {
  // Killed in its second epoch.
  auto ranks =
      start_ranks(2, args("run", {"--epochs=300", "--checkpoint.every=5step", "--log_interval=1"}));
  ASSERT_TRUE(ranks[0]->wait_until([&] { return count(ranks[0]->err(), "step 110/") > 0; }));
  for (const auto& rank : ranks) rank->send_signal(SIGKILL);
  wait_for(ranks);
  const std::string config = base::read_file(folder_ / "run/config.yaml");
  for (const auto& [option, said] :
       {std::pair{"--epochs=1", "epochs: 1 is less than the run has "},
        {"--max_steps=99", "max_steps: 99 is less than the run has "}}) {
    expect_mistake(launch_train(2, {"run", option}, folder_.path()), said);
    EXPECT_EQ(base::read_file(folder_ / "run/config.yaml"), config);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run/result.json"));
  }
}

TEST_F(ResumeRefusalTest, AFinishedRunWithoutItsCheckpointIsReplacedOnlyIfToldTo) {
  make_run(1);
  const std::string best = base::read_file(folder_ / "run/best.pt");
  std::filesystem::remove(folder_ / "run/last.pt");  // to save space
  expect_mistake(run_train({"--config", folder_ / "run/config.yaml"}),
                 "holds a finished run without a checkpoint to go on from");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/result.json"));
  ASSERT_TRUE(std::filesystem::exists(folder_ / "run/best.pt"));
  EXPECT_EQ(base::read_file(folder_ / "run/best.pt"), best);
  const auto replaced = run_train(args("run", {"--epochs=1", "--resume=auto", "--overwrite"}));
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/last.pt"));
}

TEST_F(ResumeRefusalTest, WritesTheResultOfARunThatEndedBeforeIt) {
  make_run(1);
  const auto before = result_of(folder_ / "run");
  std::filesystem::remove(folder_ / "run/result.json");
  ASSERT_EQ(run_train(args("run", {"--epochs=1", "--resume=auto"})).exit_code, 0);
  const auto after = result_of(folder_ / "run");
  for (const char* key : {"train_loss", "test_loss", "test_accuracy", "epochs", "steps"}) {
    EXPECT_EQ(after[key], before[key]) << key;
  }
}

TEST_F(ResumeRefusalTest, NamesTheStepOfTheCheckpointWhenTheLossIsNotFinite) {
  make_run(1);
  // The checkpoint that a signal in the middle of the second epoch would leave.
  train::Checkpoint checkpoint = checkpoint_of(folder_ / "run/last.pt");
  checkpoint.step += 4;
  checkpoint.sampler.consumed = 32;
  base::write_file_atomically(folder_ / "run/last.pt", serialize(checkpoint));
  const auto result = run_train(args("run", {"--resume=auto", "--optimizer.lr=1e6"}));
  EXPECT_EQ(result.exit_code, base::kExitUnavailable);
  EXPECT_THAT(result.err, HasSubstr("not finite in step "));
  EXPECT_THAT(result.err,
              HasSubstr(fmt::format("last.pt holds the run after step {}", checkpoint.step)));
  EXPECT_THAT(result.err, HasSubstr("to resume from the last checkpoint: "));
}

TEST_F(ResumeRefusalTest, KeepsAWholeCheckpointWhenARankIsKilled) {
  auto ranks = start_ranks(2, args("run", {"--epochs=1000"}));
  ASSERT_TRUE(ranks[0]->wait_until([&] { return count(ranks[0]->err(), "epoch    3/") > 0; }));
  ranks[1]->send_signal(SIGKILL);
  const auto results = wait_for(ranks);
  EXPECT_EQ(results[0].exit_code, base::kExitUnavailable) << results[0].err;
  EXPECT_EQ(count(results[0].err, "error:"), 1) << results[0].err;
  EXPECT_GE(checkpoint_of(folder_ / "run/last.pt").sampler.epoch, 3);
  EXPECT_GE(checkpoint_of(folder_ / "run/best.pt").best.front().epoch, 1);
}

// Rank 0 only notices that a peer has left.
TEST_F(ResumeRefusalTest, NamesTheFirstFailureAndHowToContinueWhicheverRankFailed) {
  // train writes this file with the third checkpoint, in step 15, after rank 0 has seen the first.
  const std::string former = folder_ / "run/step-000000000010.pt";
  const std::string plugin = SYNCBN_TEST_BIN_DIR "/plugins/librank_fault.so";
  const auto failed = [&](const std::string& fault) {
    const Words words =
        digits(folder_ / "run", {"--overwrite", "--schedule=faulty", "--plugins=[" + plugin + "]",
                                 "--checkpoint.every=5step", "--checkpoint.keep_last=2"});
    const auto result =
        start_launched_train(2, words, {{"SYNCBN_TEST_FAULT", fault + " " + former}})->wait();
    EXPECT_THAT(result.err, HasSubstr("syncbn-launch: to resume from the last checkpoint: "));
    EXPECT_THAT(result.err,
                HasSubstr("train " + (folder_ / "run").string() + " --nproc_per_node=2\n"));
    const auto ends = log_lines("run", "end");
    const std::string reason = ends.empty() ? "no end" : ends.back()["reason"];
    EXPECT_THAT(run_train({"compare", folder_ / "run"}).out, HasSubstr(reason));
    return reason;
  };
  EXPECT_THAT(failed("throw step 1"),
              ::testing::ContainsRegex("^an error: rank 1 failed: exit code 70: step 1[0-9]: "
                                       ".*the failure of this test$"));
  for (const std::string rank : {"0", "1"}) {
    EXPECT_EQ(failed("kill step " + rank),
              "an error: rank " + rank + " failed: killed by signal 9 (SIGKILL, Killed)");
  }
}

TEST_F(ResumeRefusalTest, SaysHowToContinueWhereTheLogCannotBeWritten) {
  make_run(1);
  constexpr size_t kBlocks = 20'000;  // of 1024 bytes
  constexpr size_t kRoom = 1500;      // for the line about the start, and a few steps
  const std::string note = R"({"event":"note","text":")" + std::string(500, 'x') + "\"}\n";
  std::string log = base::read_file(folder_ / "run/log.jsonl");
  while (log.size() + note.size() + kRoom < kBlocks * 1024) log += note;
  base::write_file_atomically(folder_ / "run/log.jsonl", log);
  const Words words = {"bash", "-c", fmt::format("ulimit -f {}; exec \"$@\"", kBlocks), "bash",
                       program("train")};
  const auto result = run_program(words + args("run", {"--resume=auto", "--log_interval=1"}));
  EXPECT_EQ(result.exit_code, base::kExitUnavailable) << result.err;
  EXPECT_THAT(result.err, HasSubstr("log.jsonl: File too large"));
  EXPECT_EQ(count(result.err, "to resume from the last checkpoint: "), 1) << result.err;
}

TEST_F(ResumeRefusalTest, AFolderThatDisappearsIsAFailureNotAMistake) {
  const std::filesystem::path run = folder_ / "run";
  const auto train = start_train(args("run", {"--epochs=100000", "--nproc_per_node=2"}));
  ASSERT_TRUE(train->wait_until([&] { return base::exists(run / "last.pt"); }));
  const std::string file = folder_.write("file", "");
  ASSERT_EQ(::renameat2(AT_FDCWD, file.c_str(), AT_FDCWD, run.c_str(), RENAME_EXCHANGE), 0);
  const auto result = train->wait();
  EXPECT_EQ(result.exit_code, base::kExitUnavailable) << result.err;
  EXPECT_THAT(result.err, HasSubstr("; the run's folder could be written when it began"));
  EXPECT_THAT(result.err, HasSubstr("rank 0 "));
}

TEST_F(ResumeTest, CompletesTheLogIfTheRunEndedAfterTheCheckpointAndBeforeItsLine) {
  ASSERT_EQ(run_train(args("run", {"--epochs=2"})).exit_code, 0);
  const std::string log = base::read_file(folder_ / "run/log.jsonl");
  const size_t lost = log.rfind(R"({"event":"epoch")");
  base::write_file_atomically(folder_ / "run/log.jsonl", log.substr(0, lost));
  for (const char* epochs : {"--epochs=3", "--epochs=4"}) {
    ASSERT_EQ(run_train(args("run", {"--resume=auto", epochs})).exit_code, 0);
  }
  std::vector<int> logged;
  for (const auto& line : log_lines("run", "epoch")) logged.push_back(line["epoch"]);
  EXPECT_EQ(logged, (std::vector<int>{1, 2, 3, 4}));
}

TEST_F(ResumeTest, LogsTheLastStepToo) {
  ASSERT_EQ(run_train(args("run", {"--max_steps=13"})).exit_code, 0);
  const auto steps = log_lines("run", "step");
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[1]["step"], 13);
  EXPECT_EQ(steps[1]["lr"], log_lines("run", "epoch").at(0)["lr"]);
}

TEST_F(ResumeTest, LogsTheLearningRateOfAnEpochThatWasStoppedAfterItsLastStep) {
  ASSERT_EQ(run_train(args("run", {"--epochs=1", kAll})).exit_code, 0);
  train::Checkpoint checkpoint = checkpoint_of(folder_ / "run/last.pt");
  checkpoint.sampler.epoch = 0;
  checkpoint.sampler.consumed = kDigits;
  checkpoint.epoch_line = "";
  const std::string stopped = folder_.write("stopped.pt", serialize(checkpoint));
  const auto result = run_train(args("other", {"--resume", stopped, "--epochs=1", kAll}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(log_lines("other", "epoch").at(0)["lr"], log_lines("run", "epoch").at(0)["lr"]);
}

TEST_F(ResumeTest, StartsAnewWhenThereIsNothingToGoOnFrom) {
  const auto result = run_train(args("run", {"--resume=auto", "--epochs=1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/result.json"));
}

TEST_F(ResumeRefusalTest, RefusesACheckpointThatIsCutOffAndTouchesNothing) {
  make_run(1);
  const std::string whole = base::read_file(folder_ / "run/last.pt");
  base::write_file_atomically(folder_ / "run/last.pt", whole.substr(0, whole.size() / 2));
  expect_mistake(launch_train(2, args("run", {"--resume=auto"})),
                 "last.pt is not a whole checkpoint");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/result.json"));
  EXPECT_EQ(base::read_file(folder_ / "run/last.pt").size(), whole.size() / 2);
}

TEST_F(ResumeRefusalTest, RefusesACheckpointOfAnotherModelOnceForAllRanks) {
  make_run(2);
  shorten_quiet_exits();
  auto ranks =
      start_ranks(2, args("other", {"--model.width=8", "--resume", folder_ / "run/last.pt"}));
  const auto results = wait_for(ranks);
  for (const ProgramResult& result : results) EXPECT_EQ(result.exit_code, base::kExitUsage);
  EXPECT_EQ(count(results[0].err, "error:"), 1) << results[0].err;
  EXPECT_THAT(results[0].err, HasSubstr("cannot resume from"));
  EXPECT_EQ(results[1].err, "");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "other"));
}

TEST_F(ResumeRefusalTest, RefusesAnotherOrderInTheMiddleOfAnEpoch) {
  make_run(2);
  train::Checkpoint checkpoint = checkpoint_of(folder_ / "run/last.pt");
  checkpoint.sampler.consumed = 32;
  const std::string middle = folder_.write("middle.pt", serialize(checkpoint));
  expect_mistake(
      launch_train(2, args("other", {"--sampler=distributed", "--resume", middle})),
      "in the order 'class_skewed, shuffle true, 2 ranks', this run's is 'distributed, shuffle "
      "true'");
}

TEST_F(ResumeRefusalTest, NamesTheKeysThatAreNotAsTheyWere) {
  make_run(2);
  const auto same = launch_train(2, args("run", {"--resume=auto", "--epochs=2"}));
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_THAT(same.out + same.err, ::testing::Not(HasSubstr("another configuration")));
  const auto other =
      launch_train(2, args("run", {"--resume=auto", "--epochs=3", "--log_interval=50",
                                   "--optimizer.lr=0.05", "--eval_interval=2"}));
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_EQ(count(other.out + other.err, "another configuration"), 1) << other.out << other.err;
  EXPECT_THAT(other.out + other.err,
              HasSubstr("continues with optimizer.lr 0.05 (was 0.1), eval_interval 2 (was 1)\n"));
}

TEST_F(ResumeRefusalTest, RefusesTheStateOfAnotherOptimizer) {
  make_run(2);
  expect_mistake(launch_train(2, args("run", {"--resume=auto", "--optimizer=adamw"})),
                 "made with optimizer.type sgd and this configuration has adamw");
}

// torchrun's agent keeps its store over all attempts.
TEST_F(ResumeRestartTest, TorchrunRestartsARunTwice) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const std::string log = folder_ / "run/log.jsonl";
  // Kills rank 1 in the first two attempts, once the run has saved another epoch.
  const std::string worker = folder_.write("worker.sh", R"sh(#!/bin/sh
if [ "$RANK" = 0 ] || [ "$TORCHELASTIC_RESTART_COUNT" = 2 ]; then exec "$@"; fi
"$@" &
epochs() { cat "$LOG" 2>/dev/null | grep -c '"event":"epoch"'; }
while [ "$(epochs)" -le "$TORCHELASTIC_RESTART_COUNT" ]; do sleep 0.05; done
kill -9 $!
exit 9
)sh",
                                           true);
  const Words command = {python(),
                         "-m",
                         "torch.distributed.run",
                         "--standalone",
                         "--nproc-per-node=2",
                         "--max-restarts=2",
                         "--no-python",
                         worker,
                         program("train")};
  const ProgramResult result = run_program(command + args("run", {"--resume=auto", "--epochs=6"}),
                                           {.env = {{"LOG", log}, {"OMP_NUM_THREADS", "1"}}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(log_lines("run", "start").size(), 3U);
  EXPECT_EQ(log_lines("run", "epoch").back()["epoch"], 6);
}

}  // namespace
}  // namespace syncbn::test

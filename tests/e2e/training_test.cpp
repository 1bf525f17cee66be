// The keys of a training step, in the program as a user starts it.

#include <ATen/Functions.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/train/checkpoint.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <random>
#include <sstream>
#include <thread>

#include "e2e/log_lines.h"
#include "e2e/train_program.h"
#include "launch/launcher.h"
#include "launch/leftovers.h"
#include "launch/on_terminal.h"
#include "support/eventually.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using train::Checkpoint;

/// Whether a process has the lock of a run folder.
bool is_locked(const std::string& file) {
  const base::UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fd && ::fcntl(fd.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

class TrainingTest : public ::testing::Test {
 protected:
  Words args(const std::string& name, const Words& more = {}) const {
    return digits(folder_ / name, {"--sampler", "distributed"}) + more;
  }

  ProgramResult run(const std::string& name, const Words& more = {}) const {
    return run_train(args(name, more));
  }

  Checkpoint load(const std::string& file) const { return checkpoint_of(folder_ / file); }

  std::vector<nlohmann::json> events(const std::string& name, const std::string& event) const {
    return log_of(folder_ / name, event);
  }

  TempFolder folder_;
};

// ctest runs each suite as one entry; these aliases split the file so that they run in parallel.
using TrainingBitsTest = TrainingTest;
using TrainingEndTest = TrainingTest;
using TrainingEvaluationTest = TrainingTest;
using TrainingLaunchTest = TrainingTest;

const Words kResume = {"--resume=auto"};

/// Combines everything that has state.
const Words kEverything = {"--epochs=3",
                           "--data.test_fraction=0.6",
                           "--model.width=4",
                           "--schedule.warmup=1",
                           "--accumulate=2",
                           "--amp=bf16",
                           "--ema.decay=0.9",
                           "--ema.start=0.5",
                           "--task.mixup=0.2",
                           "--task.cutmix=1",
                           "--task.label_smoothing=0.1",
                           "--clip.norm=1",
                           "--val_fraction=0.1",
                           "--loader.num_workers=3",
                           "--checkpoint.every=12step",
                           "--checkpoint.keep_last=3"};

TEST_F(TrainingTest, ReplicasInOneProcessTrainAsTheWholeBatch) {
  const Words steps = {"--batch_size=48", "--max_steps=20", "--sync_batchnorm=true"};
  ASSERT_EQ(run("whole", steps).exit_code, 0);
  const Words replicas = {"--parallel.mode=data_parallel", "--parallel.devices=[cpu, cpu]"};
  const auto parts = run("parts", steps + replicas);
  ASSERT_EQ(parts.exit_code, 0) << parts.err;
  EXPECT_THAT(parts.err, HasSubstr("1 rank x batch 48 over 2 replicas, SyncBatchNorm"));
  // Two ranks with two replicas each.
  run_ranks_of_train(2, args("ranks", steps + Words{"--batch_size=24"} + replicas));
  const Checkpoint whole = load("whole/last.pt");
  for (const char* other : {"parts/last.pt", "ranks/last.pt"}) {
    for (const auto& [name, tensor] : load(other).model) {
      EXPECT_TRUE(at::allclose(tensor, whole.model.at(name), 1e-3, 1e-4)) << other << " " << name;
    }
  }
  // A run can be resumed with and without replicas.
  const Words on = {"--batch_size=48", "--max_steps=30", "--resume=auto"};
  ASSERT_EQ(run("parts", on + replicas).exit_code, 0);
  ASSERT_EQ(run("parts", on + Words{"--max_steps=40"}).exit_code, 0);
}

TEST_F(TrainingTest, DevicesThatCannotBeAreRefused) {
  const auto refused = [&](const Words& options, const std::string& message) {
    expect_mistake(run("run", options), message);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  };
  const std::string mode = "--parallel.mode=data_parallel";
  refused({mode}, "mode data_parallel needs devices");
  refused({"--parallel.devices=[cpu]"}, "devices are for mode data_parallel");
  refused({mode, "--parallel.devices=[cpu, gpu1]"},
          "parallel.devices: 'gpu1' is not a device; use cpu, or cuda:N");
  refused({mode, "--parallel.devices=[cuda:97, cuda:98]"}, "there is no device cuda:97 here");
  refused({mode, "--parallel.devices=[cpu, cpu]", "--task=gan", "--model=dcgan"},
          "data_parallel cannot divide what task gan needs by samples");
}

TEST_F(TrainingBitsTest, GoesOnBitForBitWithEverythingOn) {
  run_ranks_of_train(2, args("whole", kEverything));
  run_ranks_of_train(2, args("parts", kEverything + Words{"--max_steps=18"}));
  // Then at the end of an epoch.
  run_ranks_of_train(2, args("parts", kEverything + kResume + Words{"--max_steps=56"}));
  run_ranks_of_train(2, args("parts", kEverything + kResume));
  ASSERT_FALSE(HasFailure());
  expect_same_run(load("parts/last.pt"), load("whole/last.pt"));
  const auto ours = events("parts", "epoch");
  const auto whole = events("whole", "epoch");
  for (const char* key : {"train_accuracy", "val_accuracy", "val_ema_accuracy", "lr", "step"}) {
    EXPECT_EQ(ours.back()[key], whole.back()[key]) << key;
  }
  EXPECT_NEAR(ours.back()["train_loss"], whole.back()["train_loss"], 1e-9);
}

TEST_F(TrainingBitsTest, GoesOnBitForBitAfterAKill) {
  const Words options = kEverything + Words{"--log_interval=1"};
  run_ranks_of_train(2, args("whole", options));
  auto ranks = start_ranks(2, args("parts", options));
  ASSERT_TRUE(ranks[0]->wait_until([&] { return count(ranks[0]->err(), "step 45/") > 0; }));
  for (const auto& rank : ranks) rank->send_signal(SIGKILL);
  wait_for(ranks);
  run_ranks_of_train(2, args("parts", options + kResume));
  expect_same_run(load("parts/last.pt"), load("whole/last.pt"));
  // The log contains each step once, with the same loss.
  const auto ours = events("parts", "step");
  const auto whole = events("whole", "step");
  ASSERT_EQ(ours.size(), whole.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_EQ(ours[i]["step"], whole[i]["step"]);
    EXPECT_EQ(ours[i]["loss"], whole[i]["loss"]);
  }
}

class ExhaustiveTrainingTest : public TrainingTest {};

TEST_F(ExhaustiveTrainingTest, GoesOnBitForBitAfterFiftyKills) {
  // More epochs than the attempts reach, however fast the machine is.
  const Words options =
      kEverything + kResume +
      Words{"--epochs=100", "--model.width=4", "--checkpoint.every=3step", "--log_interval=1"};
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const auto draw = [&](int max) { return std::uniform_int_distribution(0, max)(random); };
  const std::string marker = folder_.path();
  for (int kill = 1; kill <= 50; ++kill) {
    SCOPED_TRACE(fmt::format("kill {}", kill));
    const auto job = start_launched_train(2, args("parts", options), {{"SYNCBN_TEST_JOB", marker}});
    const int steps = draw(12);
    if (steps == 0) {
      // During the start, or later on a fast machine.
      std::this_thread::sleep_for(std::chrono::milliseconds(draw(400)));
    } else {
      ASSERT_TRUE(job->wait_until([&] { return count(job->err(), "step ") >= steps; }));
    }
    const auto processes = job_processes(marker);
    job->send_signal(SIGKILL);  // first: otherwise it reports the killed workers
    for (const pid_t pid : processes) ::kill(pid, SIGKILL);
    const auto killed = job->wait();
    EXPECT_EQ(killed.exit_code, base::kExitSignalBase + SIGKILL) << killed.err;
    EXPECT_EQ(count(killed.err, "damaged"), 0) << killed.err;
    // During execve(), a process briefly has no environment, and still holds the folder's lock.
    ASSERT_TRUE(eventually([&] {
      const auto left = job_processes(marker);
      for (const pid_t pid : left) ::kill(pid, SIGKILL);
      return left.empty() && !is_locked(folder_ / "parts/.lock");
    }));
  }
  const std::string limit = fmt::format("--max_steps={}", load("parts/last.pt").step + 50);
  for (const char* name : {"parts", "whole"}) {
    const auto result = launch_train(2, args(name, options + Words{limit}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  expect_same_run(load("parts/last.pt"), load("whole/last.pt"));
  const auto ours = events("parts", "epoch");
  const auto whole = events("whole", "epoch");
  ASSERT_EQ(ours.size(), whole.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    for (const char* key : {"step", "epoch", "val_accuracy", "val_ema_accuracy", "lr"}) {
      EXPECT_EQ(ours[i][key], whole[i][key]) << key;
    }
  }
  // Each step is in the log once; a step that an attempt repeated has the same loss.
  const auto our_steps = events("parts", "step");
  const auto steps = events("whole", "step");
  ASSERT_EQ(our_steps.size(), steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(our_steps[i]["step"], steps[i]["step"]);
    EXPECT_EQ(our_steps[i]["loss"], steps[i]["loss"]);
  }
}

TEST_F(TrainingEvaluationTest, CountsTheSameOnAnyNumberOfRanks) {
  // With a learning rate too small to change anything, each run evaluates the same network.
  std::vector<std::pair<double, double>> results;
  for (const int ranks : {1, 2, 3}) {
    const std::string name = fmt::format("run{}", ranks);
    run_ranks_of_train(ranks, args(name, {"--epochs=1", "--optimizer.lr=1e-30", "--batch_size=6",
                                          "--optimizer.momentum=0", "--update_bn_stats=1000"}));
    const auto result = result_of(folder_ / name);
    results.emplace_back(result["test_accuracy"], result["test_top5_accuracy"]);
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
}

TEST_F(TrainingBitsTest, ActivationCheckpointingChangesNoBit) {
  for (const std::string name : {"keep", "recompute"}) {
    run_ranks_of_train(
        2, args(name, {"--epochs=1", "--model=resnet18", "--model.small_input", "--data=synthetic",
                       "--data.height=8", "--data.width=8", "--data.size=32", "--data.test_size=8",
                       fmt::format("--activation_checkpointing={}", name == "recompute")}));
  }
  expect_same_run(load("recompute/last.pt"), load("keep/last.pt"));
  expect_mistake(run("digits", {"--activation_checkpointing"}),
                 "the network digits has no blocks to compute again");
}

TEST_F(TrainingEndTest, StopsInAnEvaluation) {
  const Words options = args("run", {"--epochs=1", "--data=synthetic", "--data.height=32",
                                     "--data.width=32", "--data.size=64"});
  auto ranks = start_ranks(2, options + Words{"--data.test_size=30000"});
  // An epoch is saved before its evaluation. The rank without the signal evaluates its whole part.
  ASSERT_TRUE(ranks[0]->wait_until(
      [&] { return std::filesystem::exists(std::string(folder_ / "run/last.pt")); }));
  ranks[1]->send_signal(SIGTERM);
  for (const auto& result : wait_for(ranks)) EXPECT_EQ(result.exit_code, base::kExitPreempted);
  EXPECT_TRUE(events("run", "epoch").empty());
  EXPECT_EQ(events("run", "end").at(0)["reason"], "SIGTERM");
  run_ranks_of_train(2, options + kResume + Words{"--data.test_size=1000"});
  ASSERT_EQ(events("run", "epoch").size(), 1U);
  EXPECT_TRUE(events("run", "epoch")[0].contains("test_accuracy"));
  EXPECT_EQ(load("run/last.pt").step, 4);
}

TEST_F(TrainingEvaluationTest, ChoosesTheBestOnHeldOutSamples) {
  ASSERT_EQ(run("run", {"--epochs=2", "--val_fraction=0.25", "--checkpoint.keep_best.metric=loss"})
                .exit_code,
            0);
  const auto result = result_of(folder_ / "run");
  EXPECT_TRUE(result.contains("best_val_loss")) << result;
  EXPECT_TRUE(result.contains("val_accuracy"));
  EXPECT_FALSE(result.contains("test_accuracy"));
  EXPECT_LT(result["best_val_loss"], 1);
  EXPECT_THAT(run_train({folder_ / "run", "-e"}).out, HasSubstr(R"("split":"val")"))
      << "as in PyTorch's ImageNet example";
  const auto both = run("both", {"--epochs=2"});
  EXPECT_EQ(count(both.err, "no validation data: best.pt is chosen on the test split"), 1);
}

TEST_F(TrainingEvaluationTest, DoesNotSpeakOfABestCheckpointWhereNoneIsKept) {
  const std::string none = "--checkpoint.keep_best.count=0";
  const auto held_out = run("held_out", {"--max_steps=1", "--val_fraction=0.25", none});
  EXPECT_EQ(held_out.exit_code, 0) << held_out.err;
  EXPECT_FALSE(std::filesystem::exists(std::string(folder_ / "held_out/best.pt")));
  EXPECT_EQ(count(held_out.err, "to evaluate last.pt on the test split: "), 1) << held_out.err;
  EXPECT_EQ(count(held_out.err, "best.pt"), 0) << held_out.err;
  EXPECT_EQ(count(run("both", {"--max_steps=1", none}).err, "best.pt"), 0);
}

TEST_F(TrainingEndTest, KeepsTheLastAndTheBestCheckpoints) {
  ASSERT_EQ(run("run", {"--epochs=3", "--checkpoint.every=100step", "--checkpoint.keep_last=2",
                        "--checkpoint.keep_best.count=2"})
                .exit_code,
            0);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run")) {
    if (entry.path().extension() == ".pt") names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("last.pt", "step-000000000500.pt", "best.pt",
                                                     ::testing::StartsWith("best-00000")));
  EXPECT_EQ(load("run/last.pt").step, 543);
  const auto epochs = log_of(folder_ / "run", "epoch");
  for (const Checkpoint::Best& best : load("run/last.pt").best) {
    EXPECT_EQ(best.loss, epochs[static_cast<size_t>(best.epoch - 1)]["test_loss"].get<double>());
  }
  EXPECT_EQ(load("run/step-000000000500.pt").step, 500);
  EXPECT_FALSE(load("run/best.pt").has_optimizer);
  expect_mistake(run("other", {"--resume", folder_ / "run/best.pt"}),
                 "without the state of the run; resume from last.pt");
  // A resumed run that is to keep fewer of the best removes the others.
  std::filesystem::remove(std::string(folder_ / "run/result.json"));  // as if it was killed
  ASSERT_EQ(run("run", {"--epochs=3", "--resume=auto", "--checkpoint.keep_best.count=1"}).exit_code,
            0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run")) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("best-")) << entry.path();
  }
  EXPECT_FALSE(load("run/best.pt").has_optimizer) << "it is there still";
}

TEST_F(TrainingBitsTest, SetsADamagedCheckpointAsideAndTakesTheOneBefore) {
  const Words options = {"--epochs=2", "--checkpoint.every=100step", "--checkpoint.keep_last=3"};
  ASSERT_EQ(run("whole", options).exit_code, 0);
  ASSERT_EQ(run("run", options + Words{"--max_steps=250"}).exit_code, 0);
  std::string bytes = base::read_file(folder_ / "run/last.pt");
  bytes[bytes.size() / 2] ^= 1;
  base::write_file_atomically(folder_ / "run/last.pt", bytes);
  const auto result = run("run", options + kResume);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "last.pt is damaged: it is now "), 1);
  EXPECT_THAT(result.err, ContainsRegex("resumes from .*/step-0+200.pt at epoch 2"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/last.pt.damaged"));
  expect_same_run(load("run/last.pt"), load("whole/last.pt"));
}

TEST_F(TrainingEndTest, MaxTimeSavesAndLeavesForTheNextRun) {
  const auto result = run("run", {"--epochs=10000", "--max_time=2s"});
  EXPECT_EQ(result.exit_code, base::kExitPreempted) << result.err;
  EXPECT_THAT(result.err, HasSubstr("stopped by max_time after step"));
  EXPECT_GT(load("run/last.pt").step, 0);
  EXPECT_EQ(events("run", "end").back()["reason"], "max_time");
  // The job began before this attempt, and so did its time limit.
  const std::string start = std::to_string(std::time(nullptr) - 3600);
  const auto restarted = run_train(args("restarted", {"--epochs=10000", "--max_time=30min"}),
                                   {{"SYNCBN_JOB_START", start}});
  EXPECT_EQ(restarted.exit_code, base::kExitPreempted) << restarted.err;
  EXPECT_LE(load("restarted/last.pt").step, 3);
}

TEST_F(TrainingEndTest, MaxTimeEndsAnEvaluationThatTheNextRunMakesUpFor) {
  const Words whole_epochs = {"--epochs=2", "--batch_size=1442"};
  const auto stopped = run_train(args("run", whole_epochs + Words{"--max_time=30min"}),
                                 {{"SYNCBN_JOB_START", std::to_string(std::time(nullptr) - 3600)}});
  EXPECT_EQ(stopped.exit_code, base::kExitPreempted) << stopped.err;
  EXPECT_EQ(events("run", "epoch").size(), 0U);
  EXPECT_EQ(load("run/last.pt").step, 1);
  const auto result = run("run", whole_epochs + kResume);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(events("run", "epoch").front().contains("test_accuracy"));
  EXPECT_EQ(events("run", "epoch").size(), 2U);
}

TEST_F(TrainingEndTest, EndsEarlyWithoutABetterResult) {
  const auto result = run("run", {"--epochs=50", "--schedule=constant", "--early_stop.patience=2",
                                  "--early_stop.min_delta=0.5"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result_of(folder_ / "run")["epochs"], 3);
  EXPECT_THAT(result.err, HasSubstr("ends early: 2 evaluations without a better accuracy"));
}

TEST_F(TrainingTest, SixteenBitsLearnTheDigits) {
  for (const char* amp : {"bf16", "fp16"}) {
    const auto result = launch_train(2, args(amp, {"--epochs=3", "--model.width=8", "--amp", amp,
                                                   "--scaler.growth_interval=50"}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_GE(result_of(folder_ / amp)["test_accuracy"], 0.97) << amp;
    EXPECT_EQ(load(std::string(amp) + "/last.pt").model.begin()->second.dtype(), at::kFloat);
  }
  EXPECT_TRUE(load("bf16/last.pt").scaler.empty());
  EXPECT_GT(load("fp16/last.pt").scaler.at("scale").item<float>(), 0);
}

TEST_F(TrainingBitsTest, GoesOnBitForBitWithTheScaleOfFp16) {
  const Words options = {"--epochs=2", "--model.width=8", "--amp=fp16",
                         "--scaler.growth_interval=20"};
  run_ranks_of_train(2, args("whole", options));
  run_ranks_of_train(2, args("parts", options + Words{"--max_steps=110"}));
  const Checkpoint middle = load("parts/last.pt");
  EXPECT_GT(middle.sampler.consumed, 0);
  EXPECT_FALSE(middle.scaler.empty());
  run_ranks_of_train(2, args("parts", options + kResume));
  ASSERT_FALSE(HasFailure());
  expect_same_run(load("parts/last.pt"), load("whole/last.pt"));
  EXPECT_NE(load("parts/last.pt").scaler.at("scale").item<float>(),
            middle.scaler.at("scale").item<float>())
      << "the scale changes after the stop";
}

TEST_F(TrainingTest, StepsWhoseLossIsNotFiniteOnOneRankAreLeftOutOnAll) {
  // Rank 1 has the odd digits: in a batch with two 9s, the sum of weights overflows float32.
  auto ranks = start_ranks(
      2, args("run", {"--epochs=1", "--sampler=class_skewed", "--log_interval=1", "--on_nan=skip",
                      "--task.class_weights=[1, 1, 1, 1, 1, 1, 1, 1, 1, 3e38]"}));
  const auto results = wait_for(ranks);
  for (const ProgramResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(results[1].err, "");
  const auto steps = events("run", "step");
  ASSERT_EQ(steps.size(), 91U);
  int64_t left_out = 0;
  for (const auto& step : steps) {
    const bool is_bad = step["loss"].is_null();
    left_out += is_bad ? 1 : 0;
    EXPECT_EQ(count(results[0].err,
                    fmt::format("the loss of rank 1 is not finite in step {}: the step changed "
                                "nothing\n",
                                step["step"].get<int64_t>())),
              is_bad ? 1 : 0);
  }
  EXPECT_GT(left_out, 0);
  const Checkpoint last = load("run/last.pt");
  for (const auto& [name, tensor] : last.model) {
    EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
    if (!name.ends_with("num_batches_tracked")) continue;
    EXPECT_EQ(tensor.item<int64_t>(), 91 - left_out) << name;
  }
  for (const auto& [name, tensors] : last.optimizer) {
    for (const auto& [key, tensor] : tensors) {
      EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name << " " << key;
    }
  }
}

TEST_F(TrainingTest, GivesUpAfterAHundredStepsInARowThatAreLeftOut) {
  const auto result = run("run", {"--epochs=1", "--optimizer.lr=1e6", "--on_nan=skip"});
  EXPECT_EQ(result.exit_code, base::kExitUnavailable);
  EXPECT_EQ(count(result.err, "the step changed nothing"), 100) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the last of 100 such steps"));
}

TEST_F(TrainingTest, ANumberThatIsNotFiniteIsSkippedOrUndone) {
  // Training at this learning rate ends in NaN within the first steps.
  const auto stopped = run("stop", {"--epochs=2", "--optimizer.lr=1e6"});
  EXPECT_EQ(stopped.exit_code, base::kExitUnavailable);
  ASSERT_EQ(run("run", {"--epochs=1"}).exit_code, 0);
  const auto restored = run("run", {"--epochs=2", "--resume=auto", "--optimizer.lr=1e6",
                                    "--on_nan=restore", "--restore_lr=1e-7"});
  EXPECT_EQ(restored.exit_code, 0) << restored.err;
  EXPECT_EQ(count(restored.err, "the run continues from step 181 with 1e-07 of the learning rate"),
            1)
      << restored.err;
  EXPECT_EQ(load("run/last.pt").restores, 1);
  EXPECT_EQ(load("run/last.pt").lr_scale, 1e-7);
  EXPECT_GE(result_of(folder_ / "run")["test_accuracy"], 0.8);
}

TEST_F(TrainingTest, ADivergedRunResumesFromItsLastCheckpoint) {
  ASSERT_EQ(run("run", {"--epochs=1"}).exit_code, 0);
  EXPECT_EQ(run("run", {"--epochs=2", "--resume=auto", "--optimizer.lr=1e6"}).exit_code,
            base::kExitUnavailable);
  const auto on = run("run", {"--epochs=2", "--resume=auto"});
  EXPECT_EQ(on.exit_code, 0) << on.err;
  EXPECT_EQ(result_of(folder_ / "run")["epochs"], 2);
}

TEST_F(TrainingTest, StartsBehindTheEpochsThatCountAsDone) {
  ASSERT_EQ(run("whole", {"--epochs=4"}).exit_code, 0);
  ASSERT_EQ(run("rest", {"--epochs=4", "--start-epoch=2"}).exit_code, 0);
  const auto whole = events("whole", "epoch");
  const auto rest = events("rest", "epoch");
  ASSERT_EQ(rest.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(rest[i]["epoch"], whole[i + 2]["epoch"]);
    EXPECT_EQ(rest[i]["lr"], whole[i + 2]["lr"]);
  }
  EXPECT_EQ(load("rest/last.pt").sampler.epoch, 4);
  expect_mistake(run("none", {"--epochs=4", "--start_epoch=4"}),
                 "start_epoch: 4 leaves nothing of epochs: 4");
}

TEST_F(TrainingBitsTest, DrawsASeedAndRecordsIt) {
  const Words drawn = {"--epochs=2", "--seed=null"};
  run_ranks_of_train(2, args("one", drawn + Words{"--max_steps=120"}));
  run_ranks_of_train(2, args("two", drawn + Words{"--max_steps=1"}));
  const int64_t seed = result_of(folder_ / "one")["seed"];
  EXPECT_NE(seed, result_of(folder_ / "two")["seed"].get<int64_t>());
  EXPECT_THAT(base::read_file(folder_ / "one/config.yaml"),
              HasSubstr(fmt::format("seed: {}\n", seed)));
  run_ranks_of_train(2, args("one", drawn + kResume));
  EXPECT_EQ(result_of(folder_ / "one")["seed"], seed);
  run_ranks_of_train(2, args("again", {"--epochs=2", fmt::format("--seed={}", seed)}));
  expect_same_run(load("one/last.pt"), load("again/last.pt"));
}

TEST_F(TrainingEvaluationTest, EvaluatesACheckpoint) {
  ASSERT_EQ(run("run", {"--epochs=2", "--ema.decay=0.9"}).exit_code, 0);
  const auto trained = result_of(folder_ / "run");
  const auto eval = [&](const Words& more) {
    return run_train(Words{"eval", "--config", folder_ / "run/config.yaml"} + more);
  };
  const auto last = eval({"--resume", folder_ / "run/last.pt"});
  ASSERT_EQ(last.exit_code, 0) << last.err;
  const auto result = nlohmann::json::parse(last.out);
  EXPECT_EQ(result["split"], "test");
  EXPECT_EQ(result["samples"], 355);
  EXPECT_EQ(result["accuracy"], trained["test_accuracy"]);
  EXPECT_EQ(result["ema_accuracy"], trained["test_ema_accuracy"]);
  EXPECT_NEAR(result["loss"], trained["test_loss"], 1e-9);
  const auto by_default = eval({"--split=train", "--nproc_per_node=2"});
  EXPECT_EQ(by_default.exit_code, 0) << by_default.err;
  EXPECT_THAT(by_default.out, HasSubstr("best.pt"));
  EXPECT_THAT(by_default.out, HasSubstr("\"samples\":1442"));

  expect_mistake(eval({"--split=all"}), "--split: expected one of train, val, test, got 'all'");
  expect_mistake(eval({"--split=val"}), "the data has no val split; choose --split train or test");
  expect_mistake(eval({"--run_dir", folder_ / "none"}),
                 "has no checkpoint; name a file with --resume");
  expect_mistake(eval({"--model.width=8"}), "cannot load");
}

TEST_F(TrainingEvaluationTest, ReportsEachClassTheSameOnAnyNumberOfRanks) {
  const auto trained = launch_train(
      2, args("run", {"--epochs=2", "--ema.decay=0.9", "--checkpoint.keep_best.metric=accuracy_8",
                      "--metrics=[top_k, calibration_error]"}));
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_FALSE(result_of(folder_ / "run").contains("train_accuracy_8"));
  const auto eval = [&](int ranks, const std::string& tables) {
    return launch_train(ranks,
                        {"eval", "--config=run/config.yaml", "--resume=run/last.pt", "--threads=1",
                         "--tables=" + tables},
                        folder_.path());
  };
  std::string line_of_one;
  for (const int ranks : {1, 2, 3}) {
    const std::string tables = fmt::format("new/of{}", ranks);
    const auto evaluated = eval(ranks, tables);
    ASSERT_EQ(evaluated.exit_code, 0) << evaluated.err;
    for (const std::string file : {"/confusion.csv", "/ema_confusion.csv"}) {
      EXPECT_EQ(base::read_file(folder_ / (tables + file)),
                base::read_file(folder_ / ("run" + file)))
          << ranks;
    }
    // After the launcher's prefix.
    const std::string json = evaluated.out.substr(evaluated.out.find('{'));
    if (ranks == 1) line_of_one = json;
    EXPECT_EQ(json, line_of_one) << ranks;
  }
  const auto expected = nlohmann::json::parse(line_of_one);
  EXPECT_GE(expected["top_3_accuracy"], expected["accuracy"]);
  EXPECT_GT(expected["calibration_error"], 0);
  EXPECT_TRUE(expected.contains("ema_calibration_error"));
  std::istringstream table(base::read_file(folder_ / "run/confusion.csv"));
  std::string line;
  std::getline(table, line);
  EXPECT_EQ(line, "label/answer,0,1,2,3,4,5,6,7,8,9");
  int64_t all = 0;
  int64_t right = 0;
  double recalls = 0;
  for (int64_t label = 0; std::getline(table, line); ++label) {
    int64_t answer = -1;
    int64_t samples = 0;
    int64_t own = 0;
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, ','); ++answer) {
      if (answer < 0) continue;  // the label
      samples += std::stoll(cell);
      if (answer == label) own = std::stoll(cell);
    }
    EXPECT_EQ(answer, 10);
    const double recall = static_cast<double>(own) / static_cast<double>(samples);
    EXPECT_EQ(expected[fmt::format("accuracy_{}", label)], recall);
    recalls += recall;
    right += own;
    all += samples;
  }
  EXPECT_EQ(all, 355);
  EXPECT_EQ(expected["samples"], all);
  EXPECT_EQ(expected["accuracy"], static_cast<double>(right) / static_cast<double>(all));
  EXPECT_EQ(expected["mean_class_accuracy"], recalls / 10);

  expect_mistake(eval(2, "run/last.pt"), "cannot create the folder run/last.pt: Not a dir");
  expect_mistake(launch_train(2, args("other", {"--tables=tables"})),
                 "--tables: only for train eval");
}

TEST_F(TrainingLaunchTest, SavesWhenItsTerminalIsGone) {
  OnTerminal terminal(Words{program("train")} +
                      args("run", {"--epochs=10000", "--log_interval=1"}));
  ASSERT_TRUE(terminal.shows("step 20/"));
  terminal.hang_up();
  EXPECT_EQ(terminal.wait(), base::kExitPreempted);
  EXPECT_GE(load("run/last.pt").step, 20);
  EXPECT_EQ(events("run", "end").back()["reason"], "SIGHUP");
}

TEST_F(TrainingLaunchTest, ThreadsThatWaitSleepSoonUnlessTheUserSetsHowTheyWait) {
  for (const char* name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}) ::unsetenv(name);
  const auto spin_count = [&](const Env& env, const std::string& threads) {
    const auto rank =
        start_train(args("run", {"--epochs=10000", "--overwrite", "--threads", threads}), env);
    EXPECT_TRUE(rank->wait_until([&] { return count(rank->err(), "writes to") > 0; }));
    std::istringstream environment(base::read_file(fmt::format("/proc/{}/environ", rank->pid())));
    const std::string name = "GOMP_SPINCOUNT=";
    for (std::string variable; std::getline(environment, variable, '\0');) {
      if (variable.starts_with(name)) return variable.substr(name.size());
    }
    return std::string("unset");
  };
  EXPECT_EQ(spin_count({}, "2"), "10000");
  EXPECT_EQ(spin_count({}, "1"), "unset") << "a single thread waits for no other";
  EXPECT_EQ(spin_count({{"GOMP_SPINCOUNT", "7"}}, "2"), "7");
  EXPECT_EQ(spin_count({{"OMP_WAIT_POLICY", "active"}}, "2"), "unset");
}

TEST_F(TrainingLaunchTest, AnEarlyWarningOfTheBatchSystemLosesNothing) {
  const auto lonely = start_train(args("run"), rank_env(0, 2, free_port()));
  // The signal may arrive before the program is loaded.
  const auto is_heeded = [&] {
    return launcher_blocks(lonely->pid(), SIGUSR1) ||
           has_signal(signal_set(lonely->pid(), "SigCgt:"), SIGUSR1);
  };
  ASSERT_TRUE(lonely->wait_until(is_heeded));
  lonely->send_signal(SIGUSR1);
  const auto result = lonely->wait();
  EXPECT_EQ(result.exit_code, base::kExitPreempted);
  EXPECT_THAT(result.err, HasSubstr("train: ended by SIGUSR1, with nothing to save\n"));
}

TEST_F(TrainingLaunchTest, TellsWhatARunWouldCost) {
  const auto result = run_train(args("run", {"--dry_run", "--nproc_per_node=2", "--epochs=7"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string said = result.out + result.err;
  EXPECT_THAT(said, ContainsRegex("digits: [0-9.]+ k parameters, [0-9.]+ [kM] multiply-adds"));
  EXPECT_THAT(said, HasSubstr("a step of 2 ranks x batch 8: "));
  EXPECT_THAT(said, HasSubstr("637 steps in 7 epochs: "));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(TrainingLaunchTest, StartsItsOwnRanks) {
  const Words words = args("run", {"--epochs=1", "--overwrite"});
  const auto result = run_train(words + Words{"--nproc_per_node=2", "-p", "100"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out + result.err, HasSubstr("2 ranks x batch 8"));
  EXPECT_EQ(events("run", "step").size(), 1U) << "of 91 steps, the last";
  expect_mistake(run_train(words + Words{"--nproc_per_node=2"}, rank_env(0, 1, 1)),
                 "this process is a rank already");
  expect_mistake(launch_train(2, words + Words{"--pretrained"}), "pretrained");
}

// Without waiting for the other node.
TEST_F(TrainingLaunchTest, ANodeFindsAMistakeInItsOptionsFirst) {
  const Words launcher{program("syncbn-launch"),
                       "--nnodes=2",
                       "--node_rank=0",
                       "--master_addr=127.0.0.1",
                       fmt::format("--master_port={}", free_port()),
                       "--rdzv_conf=join_timeout=1",
                       "train"};
  for (const auto& [option, message] : std::vector<std::pair<std::string, std::string>>{
           {"--epochz=3", "train: error: unknown option '--epochz'; did you mean"},
           {"--epochs=abc", "epochs"},
           {"--amp=bf17", "amp"},
           {"--config=none.yaml", "cannot read none.yaml"}}) {
    const auto result = run_program(launcher + args("run", {option}));
    EXPECT_EQ(result.exit_code, base::kExitUsage) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  // The check has a worker's variables, and leaves pipes to the workers.
  const std::string pipe = folder_ / "pipe.yaml";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string variables = folder_.write(
      "variables.yaml", "epochs: ${env:LOCAL_WORLD_SIZE}\nseed: ${env:MASTER_PORT}\n");
  for (const auto& file : {pipe, variables}) {
    const auto result = run_program(launcher + args("run", {"--config=" + file}));
    EXPECT_THAT(result.err, HasSubstr("node 1 did not arrive within 1.0 s")) << file;
  }
  // Of all that the check prints, the launcher shows only the warning.
  const auto warned =
      run_program(launcher + args("run", {"--batch_size=null", "--global_batch_size=7"}),
                  {.env = {{"LD_PRELOAD", "/none.so"}}});
  EXPECT_EQ(count(warned.err, "syncbn-launch: warning: "), 1) << warned.err;
  EXPECT_THAT(warned.err, HasSubstr("syncbn-launch: warning: if 2 ranks take part: global_batch"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(TrainingLaunchTest, SaysThatTasksWithoutALauncherTrainAlone) {
  const auto said_by = [&](const Env& env) {
    return run_train(args("run", {"--max_steps=1", "--overwrite"}), env).err;
  };
  EXPECT_THAT(said_by({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}),
              HasSubstr("SLURM_NTASKS=4, and no launcher: 4 tasks would each train alone"));
  for (const Env& env :
       std::vector<Env>{{{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}},
                        {{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}},
                        {{"PMI_SIZE", "4"}}}) {
    EXPECT_THAT(said_by(env), ::testing::Not(HasSubstr("would each train alone")));
  }
}

TEST_F(TrainingLaunchTest, LinesAboutStepsShowAveragesOfTheEpoch) {
  // A checkpoint within the second line's steps.
  const auto result = run_train(args("run", {"--max_steps=20", "-p", "10", "--nproc_per_node=2",
                                             "-b", "16", "--checkpoint.every=15step"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out + result.err, HasSubstr("2 ranks x batch 16 = 32"));
  EXPECT_THAT(
      result.out + result.err,
      ContainsRegex("loss [0-9.]+ \\([0-9.]+\\)  accuracy [0-9.]+ % \\([0-9.]+ %\\)  "
                    "top5_accuracy [0-9.]+ % \\([0-9.]+ %\\)  batch [0-9.]+ s \\([0-9.]+ s\\)  "
                    "data [0-9.]+ s \\([0-9.]+ s\\)"));
  struct Line {
    double mean_loss = 0;
    double accuracy = 0;  ///< in percent, of the steps since the line before
    double mean_accuracy = 0;
  };
  const auto line_of = [&](const std::string& step) {
    Line line;
    const size_t at = result.err.find("loss ", result.err.find("step " + step + "/20  "));
    const std::string text = at == std::string::npos ? "" : result.err.substr(at);
    EXPECT_EQ(std::sscanf(text.c_str(), "loss %*f (%lf) accuracy %lf %% (%lf %%)", &line.mean_loss,
                          &line.accuracy, &line.mean_accuracy),
              3)
        << result.err;
    return line;
  };
  const Line first = line_of("10");
  const Line last = line_of("20");
  const auto record = events("run", "epoch").back();
  EXPECT_NEAR(last.mean_loss, record["train_loss"], 1e-4);
  EXPECT_NEAR(last.mean_accuracy, 100 * record["train_accuracy"].get<double>(), 0.01);
  EXPECT_EQ(first.accuracy, first.mean_accuracy);
  EXPECT_NEAR(last.accuracy, 2 * last.mean_accuracy - first.mean_accuracy, 0.03);
}

TEST_F(TrainingLaunchTest, StartsItsOwnRanksOnTwoNodes) {
  const std::string port = fmt::format("--master_port={}", free_port());
  std::vector<std::unique_ptr<Program>> nodes;
  for (const char* rank : {"--node_rank=0", "--node_rank=1"}) {
    nodes.push_back(start_train(args("run", {"--epochs=1", "--nproc_per_node=2", "--nnodes=2", rank,
                                             "--master_addr=127.0.0.1", port})));
  }
  for (const auto& result : wait_for(nodes)) EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto starts = events("run", "start");
  ASSERT_EQ(starts.size(), 1U);
  EXPECT_EQ(starts[0]["world_size"], 4);
  EXPECT_EQ(result_of(folder_ / "run")["world_size"], 4);
  const std::filesystem::directory_iterator runs(folder_.path());
  EXPECT_EQ(std::distance(begin(runs), end(runs)), 1);
}

TEST_F(TrainingBitsTest, DeterministicRunsHaveTheSameBits) {
  for (const char* name : {"one", "two"}) {
    run_ranks_of_train(2, args(name, {"--epochs=1", "--deterministic"}));
  }
  ASSERT_FALSE(HasFailure());
  expect_same_run(load("one/last.pt"), load("two/last.pt"));
}

class TrainingOptionsTest : public TrainingTest, public ::testing::WithParamInterface<Words> {};

TEST_P(TrainingOptionsTest, TwoRanksLearnWithThem) {
  run_ranks_of_train(2, args("run", GetParam() + Words{"--epochs=1"}));
  ASSERT_FALSE(HasFailure());
  const auto result = result_of(folder_ / "run");
  EXPECT_LT(result["train_loss"], 1.2) << result;
  EXPECT_GT(result["test_accuracy"], 0.9) << result;
}

// The ranks' running statistics differ only without SyncBatchNorm over all ranks.
INSTANTIATE_TEST_SUITE_P(
    , TrainingOptionsTest,
    ::testing::Values(Words{"--ddp.comm_hook=fp16"}, Words{"--ddp.comm_hook=bf16"},
                      Words{"--ddp.comm_hook=power_sgd"}, Words{"--ddp.static_graph"},
                      Words{"--sync_batchnorm_group=1"}, Words{"--sync_timeout=30"},
                      Words{"--distribute_bn=reduce", "--sync_batchnorm=false"},
                      Words{"--distribute_bn=none", "--sync_batchnorm=false"}),
    [](const auto& options) {
      std::string name = options.param[0].substr(2);
      std::ranges::replace_if(
          name, [](char c) { return c == '.' || c == '='; }, '_');
      return name;
    });

TEST_F(TrainingLaunchTest, RefusesWhatDoesNotFitInOneMessage) {
  const auto expect = [&](const Words& more, const std::string& message, int ranks = 1) {
    expect_mistake(ranks == 1 ? run("run", more) : launch_train(ranks, args("run", more)), message);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  };
  expect({"--accumulate=3"}, "accumulate: a rank's batch of 8 samples cannot be divided into 3", 2);
  expect({"--sync_batchnorm_group=3"}, "2 ranks cannot be divided into groups of 3", 2);
  expect({"--checkpoint.keep_best.metric=acuracy"},
         "there is no 'acuracy'; choose from accuracy, top5_accuracy, mean_class_accuracy, "
         "accuracy_0, accuracy_1",
         2);
  expect({"--checkpoint.every=often"}, "checkpoint.every: expected a duration, such as");
  expect({"--activation_checkpointing", "--ddp.find_unused_parameters"},
         "activation_checkpointing and ddp.find_unused_parameters do not work together");
  expect({"--max_time=3ep"}, "--max_time: expected a time, such as 50min, got 3ep; to limit");
  expect({"--clip.norm=1", "--clip.value=1"},
         "clip: norm 1 and value 1 do not work together; set all but one to null");
  expect({"--val_fraction=0.0001"}, "leaves no sample to evaluate on");
}

}  // namespace
}  // namespace syncbn::test

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/train/checkpoint.h>

#include <sstream>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> short_run(const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {"--config", shipped_config("digits.yaml"), "--epochs=1"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(RunFolderProgramTest, NumbersRunsOfOneConfigurationByDefault) {
  const TempFolder cwd;
  for (const char* run : {"runs/digits", "runs/digits-2", "runs/digits-3"}) {
    const auto result = run_train(short_run(), {}, cwd.path().string());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr(std::string("writes to ") + run + "\n"));
    for (const char* file : {"config.yaml", "log.jsonl", "last.pt", "best.pt", "result.json"}) {
      EXPECT_TRUE(std::filesystem::exists(cwd.path() / run / file)) << run << "/" << file;
    }
  }
}

TEST(RunFolderProgramTest, AResumeGoesOnWithTheNewestRun) {
  const TempFolder cwd;
  for (int run = 0; run < 2; ++run) {
    ASSERT_EQ(run_train(short_run(), {}, cwd.path()).exit_code, 0);
  }
  const auto on = run_train(short_run({"--resume=auto", "--epochs=2"}), {}, cwd.path());
  EXPECT_EQ(on.exit_code, 0) << on.err;
  EXPECT_THAT(on.err, HasSubstr("writes to runs/digits-2\n"));
  EXPECT_EQ(result_of(cwd / "runs/digits-2")["epochs"], 2);
  EXPECT_EQ(result_of(cwd / "runs/digits")["epochs"], 1);
  // The configuration that a run leaves leads to its folder.
  const auto again = run_train(
      {"--config", "runs/digits/config.yaml", "--resume=auto", "--epochs=2"}, {}, cwd.path());
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(result_of(cwd / "runs/digits")["epochs"], 2);
  // Also where both are elsewhere by now.
  std::filesystem::rename(cwd / "runs/digits", cwd / "moved");
  const TempFolder elsewhere;
  const auto moved =
      run_train({"--config", cwd / "moved/config.yaml", "--epochs=3"}, {}, elsewhere.path());
  EXPECT_EQ(moved.exit_code, 0) << moved.err;
  EXPECT_EQ(result_of(cwd / "moved")["epochs"], 3);
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));
}

TEST(RunFolderProgramTest, AConfigYamlOfOnesOwnIsNoRuns) {
  const TempFolder cwd;
  const std::string own = base::read_file(shipped_config("digits.yaml")) + "max_steps: 1\n";
  base::write_file_atomically(cwd / "own/config.yaml", own);
  std::filesystem::create_directory(cwd / "own/more");
  const std::string folder = cwd / "own";
  for (const char* file : {"config.yaml", "./config.yaml", ".", "more/../config.yaml"}) {
    const auto result = run_train({"--config", file, "--overwrite"}, {}, folder);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("writes to runs/config\n"));
  }
  // The file of a run leads to the run.
  for (const char* file : {"./config.yaml", ".", "../config/config.yaml"}) {
    const auto resumed =
        run_train({"--config", file, "--max_steps=2"}, {}, cwd / "own/runs/config");
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_THAT(resumed.err, HasSubstr("own/runs/config"));
    EXPECT_FALSE(std::filesystem::exists(cwd / "own/runs/config/runs"));
  }
  const auto refused = run_train({"--config", "config.yaml", "--run_dir=."}, {}, folder);
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, "error:"), 1) << refused.err;
  EXPECT_EQ(base::read_file(cwd / "own/config.yaml"), own);
}

TEST(RunFolderProgramTest, BestHoldsTheNetworkOfTheBestEpoch) {
  const TempFolder folder;
  const auto args = [&](const std::string& run, int64_t epochs) {
    return std::vector<std::string>{"--config",           shipped_config("digits.yaml"),
                                    "--schedule",         "constant",
                                    "--run_dir",          folder / run,
                                    "--optimizer.lr=0.4", fmt::format("--epochs={}", epochs)};
  };
  ASSERT_EQ(run_train(args("whole", 4)).exit_code, 0);
  const auto load = [&](const std::string& file) {
    const std::string path = folder / file;
    return train::parse_checkpoint(base::read_file(path), path);
  };
  const auto best = load("whole/best.pt");
  const int64_t best_epoch = best.best.front().epoch;
  EXPECT_EQ(best_epoch, result_of(folder / "whole")["best_epoch"]);
  EXPECT_FALSE(best.has_optimizer);
  ASSERT_EQ(run_train(args("part", best_epoch)).exit_code, 0);
  const auto part = load("part/last.pt");
  ASSERT_EQ(best.model.size(), part.model.size());
  for (const auto& [name, tensor] : best.model) {
    EXPECT_TRUE(at::equal(tensor, part.model.at(name))) << name;
  }
}

TEST(RunFolderProgramTest, AResNetTrainsByTheStepSchedule) {
  const TempFolder folder;
  base::write_file_atomically(folder / "resnet.yaml", R"(
epochs: 3
global_batch_size: 8
model: {type: resnet18, small_input: true}
data: {type: synthetic, channels: 3, height: 8, width: 8, classes: 4, size: 32, test_size: 16}
optimizer: {type: sgd, lr: 0.05, momentum: 0.9}
schedule: {type: step, step_size: 2, gamma: 0.5}
)");
  run_ranks_of_train(2, {"--config", folder / "resnet.yaml", "--run_dir", folder / "run"});
  std::vector<double> rates;
  std::vector<double> losses;
  std::istringstream log(base::read_file(folder / "run/log.jsonl"));
  for (std::string line; std::getline(log, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json["event"] != "epoch") continue;
    rates.push_back(json["lr"]);
    losses.push_back(json["train_loss"]);
  }
  EXPECT_THAT(rates, ::testing::ElementsAre(0.05, 0.05, 0.025));
  EXPECT_LT(losses.at(2), losses.at(0));
}

TEST(RunFolderProgramTest, DoesNotReplaceARunUnasked) {
  const TempFolder folder;
  ASSERT_EQ(run_train(short_run({"--run_dir", folder / "run"})).exit_code, 0);
  const std::string log = base::read_file(folder / "run/log.jsonl");
  const auto refused = run_train(short_run({"--run_dir", folder / "run"}));
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, "error:"), 1) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("already holds a run"));
  EXPECT_EQ(base::read_file(folder / "run/log.jsonl"), log);
  const auto replaced = run_train(short_run({"--run_dir", folder / "run", "--overwrite"}));
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_EQ(count(base::read_file(folder / "run/log.jsonl"), "\"start\""), 1);
}

}  // namespace
}  // namespace syncbn::test

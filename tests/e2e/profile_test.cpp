// `profile` and `train profile`: what they write, and that they do not change the training.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/models/weights.h>

#include <filesystem>
#include <fstream>

#include "e2e/train_program.h"
#include "support/python.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The mistakes in the traces of all ranks; empty if there are none.
std::string faults_of_traces(const std::string& run, int first_step, int ranks, int steps,
                             int loader_threads = 0) {
  std::string faults;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto checked =
        run_program({python(), SYNCBN_SOURCE_DIR "/tests/e2e/check_trace.py",
                     fmt::format("{}/profile/trace-{}-rank-{}.json", run, first_step, rank),
                     std::to_string(steps), std::to_string(loader_threads)});
    if (checked.exit_code != 0) faults += "the checker failed: " + checked.err;
  }
  return faults;
}

nlohmann::json summary_of(const std::string& run) {
  return nlohmann::json::parse(base::read_file(run + "/profile/summary.json"));
}

TEST(ProfileTest, RecordsAllRanksAndChangesNoBit) {
  const TempFolder folder;
  const std::string plain = folder / "plain";
  const std::string profiled = folder / "profiled";
  const Words settings{"--epochs=1", "--max_steps=12", "--loader.num_workers=1"};
  ASSERT_EQ(launch_train(2, digits(plain, settings)).exit_code, 0);
  const Words more = {"--profile.skip=4", "--profile.steps=3"};
  const auto result = launch_train(2, digits(profiled, settings + more));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("profile of steps 5 to 7: "), HasSubstr("exchange of gradients: "),
                    HasSubstr("exchange of batch norm's statistics: "),
                    HasSubstr("profile/trace-5-rank-0.json opens at")));
  EXPECT_EQ(faults_of_traces(profiled, 5, 2, 3, /*loader_threads=*/1), "");
  const auto summary = summary_of(profiled);
  EXPECT_EQ(summary["trace"], "profile/trace-5-rank-0.json");
  EXPECT_EQ(summary["layers"].size(), 10);
  for (const char* layer : {"conv1", "bn1", "conv2", "fc"}) {
    EXPECT_THAT(result.err, HasSubstr(fmt::format("  {} ", layer)));
  }
  const auto before = models::read_state_dict(plain + "/last.pt");
  const auto after = models::read_state_dict(profiled + "/last.pt");
  ASSERT_EQ(before.size(), after.size());
  for (const auto& item : before) {
    EXPECT_TRUE(at::equal(item.value(), after[item.key()])) << item.key();
  }
}

TEST(ProfileTest, LeavesOutAnEvaluationAmongItsSteps) {
  const TempFolder folder;
  const std::string run = folder / "run";
  // An epoch has two steps.
  const auto result = launch_train(
      2, digits(run, {"--epochs=3", "--batch_size=512", "--profile.skip=1", "--profile.steps=4"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("profile of steps 2 to 5: "));
  // Another file for the steps after each evaluation.
  EXPECT_EQ(faults_of_traces(run, 2, 2, 1), "");
  EXPECT_EQ(faults_of_traces(run, 3, 2, 2), "");
  EXPECT_EQ(faults_of_traces(run, 5, 2, 1), "");
}

TEST(ProfileTest, OfOneRankHasNoExchange) {
  const TempFolder folder;
  const std::string run = folder / "run";
  const auto result = run_train(digits(run, {"--epochs=1", "--max_steps=4", "--profile.skip=1",
                                             "--profile.steps=2", "--sampler.type=distributed"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("profile of steps 2 to 3: "), HasSubstr("mean of 1 rank"),
                                Not(HasSubstr("exchange of"))));
  EXPECT_EQ(faults_of_traces(run, 2, 1, 2), "");
}

TEST(ProfileTest, EndsWithTheRun) {
  const TempFolder folder;
  const std::string run = folder / "run";
  const auto short_run = [&](const std::string& skip) {
    return run_train(digits(run, {"--epochs=1", "--max_steps=4", "--overwrite=true",
                                  "--profile.skip=" + skip, "--profile.steps=20"}));
  };
  auto result = short_run("2");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("profile of steps 3 to 4: "));
  result = short_run("10");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("lower profile.skip"));
  EXPECT_FALSE(fs::exists(run + "/profile")) << "a new run removes the profiles of the former";
}

TEST(ProfileTest, TrainingGoesOnIfItCannotBeWritten) {
  const TempFolder folder;
  const std::string run = folder / "run";
  ASSERT_EQ(launch_train(2, digits(run, {"--epochs=1"})).exit_code, 0);
  std::ofstream(run + "/profile") << "not a folder";
  const auto result = launch_train(
      2, digits(run, {"--epochs=2", "--resume=auto", "--profile.skip=1", "--profile.steps=1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string warning = "the profile was not written, and training goes on: ";
  const size_t first = result.err.find(warning);
  ASSERT_NE(first, std::string::npos) << result.err;
  EXPECT_EQ(result.err.find(warning, first + 1), std::string::npos) << result.err;
  EXPECT_EQ(result_of(run)["epochs"], 2);
}

TEST(ProfileTest, ATraceThatCannotBeWrittenIsNamed) {
  const TempFolder folder;
  const std::string run = folder / "run";
  ASSERT_EQ(launch_train(2, digits(run, {"--epochs=1"})).exit_code, 0);
  // An epoch has 91 steps.
  const std::string trace = run + "/profile/trace-93-rank-1.json";
  fs::create_directories(trace);
  const auto result = launch_train(
      2, digits(run, {"--epochs=2", "--resume=auto", "--profile.skip=1", "--profile.steps=1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "not all traces were written: "), 1) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr(trace), HasSubstr("trace-93-rank-0.json opens at")));
  EXPECT_EQ(summary_of(run)["first_step"], 93);
}

TEST(ProfileTest, IsMadeOnRequest) {
  const TempFolder folder;
  const std::string run = folder / "run";
  // An evaluation among the steps would divide the trace.
  const auto training =
      start_launched_train(2, digits(run, {"--epochs=5000", "--eval_interval=5000"}));
  ASSERT_TRUE(training->wait_until([&] { return fs::exists(run + "/last.pt"); }));
  const auto asked = run_train({"profile", run, "--steps=2"});
  EXPECT_EQ(asked.exit_code, 0) << asked.err;
  EXPECT_THAT(asked.out, AllOf(HasSubstr("profile of steps "), HasSubstr("conv2"),
                               HasSubstr("opens at https://ui.perfetto.dev")));
  const auto summary = summary_of(run);
  EXPECT_EQ(faults_of_traces(run, summary["first_step"], 2, 2), "");
  EXPECT_FALSE(fs::exists(run + "/profile/request"));
  training->send_signal(SIGTERM);
  training->wait();
  expect_mistake(run_train({"profile", run}), "no run is training in");
}

TEST(ProfileTest, RefusesMoreStepsThanMemoryHolds) {
  const TempFolder folder;
  const std::string run = folder / "run";
  const auto result = run_train(digits(run, {"--profile.steps=21"}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("profile.steps"), HasSubstr("20")));
  expect_mistake(run_train({"profile", run, "--steps", "21"}), "from 1 to 20");
}

}  // namespace
}  // namespace syncbn::test

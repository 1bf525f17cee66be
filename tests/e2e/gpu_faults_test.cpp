// A rank of `train` that fails on a GPU, under the launcher. tests/dist/gpu_faults_test.cpp has
// failures before training and in custom programs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/gpus.h>

#include <algorithm>
#include <string>
#include <vector>

#include "e2e/log_lines.h"
#include "e2e/train_program.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

struct Fault {
  const char* what;
  const char* place;
  const char* rank = "1";
};

std::string name_of(const ::testing::TestParamInfo<Fault>& info) {
  const Fault& fault = info.param;
  return fmt::format("{}_in_{}_of_rank_{}", fault.what, fault.place, fault.rank);
}

/// Seconds between the first and the last worker's end in the first attempt.
double seconds_to_end(const std::string& events) {
  std::vector<double> ends;
  for (const auto& event : json_lines(base::read_file(events), "worker_ended")) {
    if (event["attempt"] == 0) ends.push_back(event["seconds"]);
  }
  EXPECT_EQ(ends.size(), 2);
  if (ends.empty()) return 0;
  const auto [first, last] = std::minmax_element(ends.begin(), ends.end());
  return *last - *first;
}

class GpuTrainFaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(GpuTrainFaultTest, EndsAllWorkersAndTheRestartGoesOn) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() > 1, "two-gpus");
  const Fault fault = GetParam();
  const std::string what = fault.what;
  const TempFolder folder;
  const std::string run = folder / "run";
  const std::string events = folder / "events";
  Words words = Words{program("syncbn-launch"),
                      "--standalone",
                      "--nproc_per_node=2",
                      "--max_restarts=1",
                      "--event_log_handler=json:" + events,
                      program("train")} +
                digits(run, {"--model.width=4", "--batch_size=32",
                             "--max_steps=24",  // an epoch has 22
                             "--checkpoint.every=10step",
                             "--plugins=[" SYNCBN_TEST_BIN_DIR "/plugins/librank_fault.so]",
                             "--schedule=faulty", "--task.loss=faulty"});
  if (what == "stop") words.emplace_back("--timeout=6");
  const ProgramResult result = run_program(
      words, {.env = {{"OMP_NUM_THREADS", "1"},
                      {"SYNCBN_TEST_FAULT",
                       fmt::format("{} {} {} {}/last.pt", what, fault.place, fault.rank, run)}}});
  const std::string text = result.out + result.err;
  ASSERT_EQ(result.exit_code, 0) << text;
  const bool is_killed = what == "kill";
  const bool is_stopped = what == "stop";
  // The rank that waits for a stopped one fails at the timeout.
  EXPECT_THAT(text, HasSubstr(fmt::format("rank {} failed: {}", is_stopped ? "0" : fault.rank,
                                          is_killed    ? "killed by signal 9"
                                          : is_stopped ? "exit code 75"
                                                       : "exit code 70")));
  const int errors = count(result.err, "] train: ");
  // The launcher may end the rank that waits for a killed one before that rank reports it.
  EXPECT_LE(errors, 1) << text;
  EXPECT_GE(errors, is_killed ? 0 : 1) << text;
  if (is_stopped) {
    EXPECT_THAT(text, ContainsRegex("train: error: rank 0.*rank 1 "));
  } else if (!is_killed) {
    EXPECT_THAT(text, ContainsRegex("train: .*the failure of this test"));
  }
  EXPECT_LT(seconds_to_end(events), 10) << text;
  EXPECT_THAT(text, ContainsRegex("resumes from .*last.pt at epoch [12], step [12][0-9]"));
  EXPECT_EQ(result_of(run)["world_size"], 2);
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuTrainFaultTest,
                         ::testing::Values(Fault{"kill", "step"}, Fault{"stop", "step"},
                                           Fault{"kill", "checkpoint", "0"}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(
    Exhaustive, GpuTrainFaultTest,
    ::testing::Values(Fault{"throw", "step"}, Fault{"kill", "step", "0"},
                      Fault{"throw", "evaluation"}, Fault{"kill", "evaluation"},
                      Fault{"stop", "evaluation"}, Fault{"throw", "evaluation", "0"},
                      Fault{"kill", "checkpoint"}, Fault{"throw", "checkpoint"},
                      Fault{"throw", "checkpoint", "0"}, Fault{"stop", "checkpoint"}),
    name_of);

}  // namespace
}  // namespace syncbn::test

// What the launcher reports about ranks that wait for each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/env.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// The launcher spends at most keep_alive_interval on collecting stacks.
const Words kOptions{"--hang_timeout=6", "--rdzv_conf=keep_alive_interval=1"};

/// Starts one node whose ranks go wrong in the way `how` (see waiting_worker.cpp).
Program& start(Nodes& nodes, int ranks, const std::string& how, std::vector<std::string> options) {
  options.insert(options.end(), {"--nnodes=1", "--master_port=0"});
  return nodes.start(0, ranks, options, {SYNCBN_WAITING_WORKER, how});
}

TEST(ExhaustiveHangTest, RanksThatWaitInDifferentGroupsAreCompared) {
  Nodes nodes(1);
  const auto result = start(nodes, 2, "crossed", kOptions).wait();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(
      result.err,
      ContainsRegex("rank 0 \\(.*\\) holds up the others: no progress for [0-9.]+ s; it and "
                    "another rank wait for each other: rank 0 waits in all_reduce #[0-9]+ "
                    "of group '0' for rank 1, rank 1 waits in all_reduce #1 of group '1' "
                    "for rank 0; all ranks must"));
}

TEST(HangTest, ARankThatSkipsACallIsNamed) {
  Nodes nodes(1);
  const auto result = start(nodes, 3, "skips", kOptions).wait();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err,
              AllOf(ContainsRegex("rank 2 \\(.*\\) holds up the others"),
                    HasSubstr("rank 2 waits in all_reduce #1 of group '1' for rank 0"),
                    ContainsRegex("rank 0 waits in all_reduce #[0-9]+ of group '0' for rank 2"),
                    Not(HasSubstr("sees nothing"))));
}

/// The flight record file that the failed job names.
std::string flight_file(const std::string& err) {
  const std::string command = "syncbn-launch explain ";
  const size_t begin = err.find(command) + command.size();
  return err.substr(begin, err.find('\n', begin) - begin);
}

TEST(HangTest, TheFlightRecordsOutliveTheRanks) {
  Nodes nodes(2);
  const Words options{"--hang_timeout=6",
                      "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=60",
                      "--log_dir=" + nodes.folder().path().string()};
  const Words program{SYNCBN_WAITING_WORKER, "sleeps"};
  nodes.start(0, 2, options, program);
  nodes.start(1, 1, options, program);
  const auto results = nodes.wait();
  const std::string torch = nodes.folder() / "torch";
  std::vector<std::string> explain{kLauncher, "explain", "--torch=" + torch};
  for (const auto& file : std::filesystem::recursive_directory_iterator(nodes.folder().path())) {
    if (file.path().filename() == "flight.jsonl") explain.push_back(file.path());
  }
  ASSERT_EQ(explain.size(), 5) << "one of each node";
  EXPECT_THAT(explain, Contains(flight_file(results[1].err)));
  const auto explained = run_program(explain);
  EXPECT_THAT(explained.out,
              AllOf(HasSubstr("3 ranks, at "), HasSubstr("rank 2 (" + base::hostname()),
                    HasSubstr("#1 of group '1', all_reduce of Float [4]:\n"),
                    HasSubstr(") has not come to it: it has called nothing in this group\n"),
                    Not(HasSubstr("Nothing is recorded"))))
      << explained.err;
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const auto traced = run_program(
      {python(), "-m", "torch.distributed.flight_recorder.fr_trace", torch, "-p", "rank_"});
  EXPECT_EQ(traced.exit_code, 0);
  EXPECT_THAT(traced.out + traced.err,
              AllOf(ContainsRegex("Not all ranks joining collective.*1"),
                    HasSubstr("missing ranks: {2}"), HasSubstr("collective: nccl:all_reduce")));
}

// As under another launcher.
TEST(HangTest, WithoutALauncherTheRecordsAreInAFolder) {
  Nodes nodes(1);
  Program& job = nodes.start(0, 2, {"--nnodes=1", "--master_port=0"},
                             shell("unset SYNCBN_FLIGHT_FD; SYNCBN_FLIGHT_FOLDER=. exec " +
                                   std::string(SYNCBN_WAITING_WORKER) + " sleeps"));
  const auto explained = [&] {
    const std::string folder = nodes.folder().path();
    return run_program({kLauncher, "explain", folder + "/rank-0.flight", folder + "/rank-1.flight"})
        .out;
  };
  // The last call, not one of the start-up, in which a rank may also be behind for a moment.
  const std::string call = "#1 of group '1', all_reduce of Float [4]:\n";
  const std::string named = "has not come to it: it has called nothing in this group";
  EXPECT_TRUE(job.wait_until([&] { return explained().find(call) != std::string::npos; }));
  job.send_signal(SIGTERM);
  job.wait();
  EXPECT_THAT(explained(), AllOf(HasSubstr(call), HasSubstr(named))) << "once the ranks have ended";
}

TEST(HangTest, ARankThatIsSlowerThanTheOthersIsNamedOnAnyNode) {
  Nodes nodes(2);
  const std::string program = SYNCBN_WAITING_WORKER;
  Program& first = nodes.start(0, 2, {"--straggler_interval=2"}, {program, "slow"});
  nodes.start(1, 1, {"--straggler_interval=2"}, {program, "slow"});
  ASSERT_TRUE(first.wait_until([&] { return !first.err().empty(); }));
  EXPECT_THAT(first.err(),
              ContainsRegex("^syncbn-launch: rank 2 \\(.*\\) is slow, and the others wait "
                            "for it: it spends .* between collectives"));
  first.send_signal(SIGTERM);
  nodes.wait();
}

// Over NCCL no thread blocks in a call.
TEST(GpuHangTest, ARankThatIsSlowerThanTheOthersIsNamedWithItsGpu) {
  Nodes nodes(1);
  Program& job = start(nodes, 2, "slow", {"--straggler_interval=2"});
  ASSERT_TRUE(job.wait_for_err("is slow, and")) << job.err();
  EXPECT_THAT(job.err(),
              ContainsRegex("syncbn-launch: rank 1 \\(.*, GPU [0-9a-fA-F:.]+, pid [0-9]+\\) is "
                            "slow, and the others wait for it: it spends .* between"));
  job.send_signal(SIGTERM);
  job.wait();
}

// The 30 s are the launcher's.
TEST(HangNameTest, WithoutATimeoutARankThatSleepsIsNamedOnce) {
  Nodes nodes(2);
  const std::string program = SYNCBN_WAITING_WORKER;
  Program& first = nodes.start(0, 2, {}, {program, "sleeps"});
  Program& second = nodes.start(1, 1, {}, {program, "sleeps"});
  Nodes one(1);  // a launcher without others judges by itself
  Program& alone = start(one, 2, "sleeps", {});
  const std::string name = "holds up the others";
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(first.wait_for_err(name));
  EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(28));
  EXPECT_THAT(
      first.err(),
      ContainsRegex("rank 2 \\(.*\\) holds up the others: no progress for [0-9.]+ s; it has "
                    "not come to all_reduce #1 of group '1', in which rank 0 \\(and 1 "
                    "other rank\\) waits"));
  EXPECT_THAT(run_program({kLauncher, "explain", std::to_string(second.pid())}).out,
              AllOf(ContainsRegex("    1 .* all_reduce #1 of group '1'"),
                    ContainsRegex("    2 .* #[0-9]+ of group '0'")));
  EXPECT_THAT(run_program({kLauncher, "status", std::to_string(first.pid())}).out,
              ContainsRegex("    1 .* waits in all_reduce #1 of group '1' for [0-9.]+ s"));
  ASSERT_TRUE(alone.wait_for_err(name));
  std::this_thread::sleep_for(std::chrono::seconds(11));  // launchers look every 10 s
  for (Program* const job : {&first, &alone}) {
    EXPECT_EQ(job->err().find(name), job->err().rfind(name));
    EXPECT_TRUE(job->running());
  }
  EXPECT_TRUE(second.running());
  alone.end_by(SIGTERM);
  first.send_signal(SIGTERM);
  nodes.wait();
}

}  // namespace
}  // namespace syncbn::test

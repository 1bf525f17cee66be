// --max_restarts: what the attempts of a run share, and what each attempt has of its own.
#include <gmock/gmock.h>
#include <signal.h>

#include <ctime>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "launch/launcher.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchRestartTest, FailsTwiceThenSucceeds) {
  TempFolder folder;
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
      "[ $RANK = 1 ] && exit 0; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 7";
  const auto result = launch({"--max_restarts=2", "--nproc_per_node=2", "sh", "-c", script},
                             {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line : {"[0] attempt 0 of 2", "[0] attempt 1 of 2", "[0] attempt 2 of 2"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 0 failed: exit code 7"), HasSubstr("restart 1 of 2"),
                    HasSubstr("restart 2 of 2"), Not(HasSubstr("no restart"))));
}

TEST(LaunchRestartTest, AttemptsShareTheStartOfTheJob) {
  const auto before = std::time(nullptr);
  // The second attempt starts in a later second.
  const auto result = launch({"--max_restarts=1", "sh", "-c",
                              "echo $SYNCBN_JOB_START; sleep 1; exit $((1 - SYNCBN_ATTEMPT))"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::istringstream words(result.out);
  std::time_t first = 0;
  std::time_t second = 0;
  EXPECT_TRUE(words >> first >> second) << result.out;
  EXPECT_GE(first, before);
  EXPECT_EQ(first, second);
}

TEST(LaunchRestartTest, EachAttemptHasAFreshPort) {
  const auto result = launch({"--max_restarts=2", "sh", "-c", "echo $MASTER_PORT; exit 1"});
  std::istringstream words(result.out);
  std::set<std::string> ports;
  for (std::string port; words >> port;) ports.insert(port);
  EXPECT_EQ(ports.size(), 3U) << result.out;
}

TEST(LaunchRestartTest, NothingOfAnAttemptIsLeftWhenTheNextBegins) {
  TempFolder folder;
  // Ignores SIGTERM and has a child in another session; the next attempt looks for both.
  const auto result =
      launch({"--max_restarts=1", "--shutdown_timeout=0.1", "--nproc_per_node=2", "sh", "-c",
              "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then "
              "  for pid in $(cat pids); do [ -d /proc/$pid ] && echo left $pid; done; exit 0; fi; "
              "trap '' TERM; setsid sleep 1000 & echo $! $$$$ >> pids; "
              "while [ $(wc -l < pids) -lt 2 ]; do sleep 0.01; done; "
              "[ $RANK = 1 ] && exit 3; exec sleep 1000"},
             {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "");
}

// Also if a signal arrives while an attempt is failing.
TEST(LaunchRestartTest, ASignalInTheGraceTimeEndsTheRunToo) {
  TempFolder folder;
  const std::string script =
      "[ $RANK = 1 ] && { while [ ! -e up ]; do sleep 0.01; done; exit 4; }; "
      "trap 'echo ending' TERM; touch up; while [ ! -e go ]; do sleep 0.01; done; exit 0";
  Program launcher(launch_command({"--max_restarts=3", "--nproc_per_node=2", "sh", "-c", script}),
                   {.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder.path()});
  ASSERT_TRUE(launcher.wait_until([&] { return launcher.out() == "[0] ending\n"; }));
  launcher.send_signal(SIGTERM);
  ASSERT_TRUE(launcher.wait_until([&] { return !pending(launcher.pid(), SIGTERM); }));
  folder.write("go", "");  // the first signal does not shorten the grace period
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 failed: exit code 4"),
                                HasSubstr("ended by SIGTERM, instead of restart 1 of 3")));
}

TEST(LaunchRestartTest, ASignalEndsTheWaitBeforeARestart) {
  Program launcher(launch_command({"--max_restarts=100", "sh", "-c", "exit 9"}));
  ASSERT_TRUE(launcher.wait_for_err("restart 4"));
  launcher.end_by(SIGTERM);
}

TEST(LaunchRestartTest, StopsWhenARankFailsInTheSameWayAtTheSameStepAgainAndAgain) {
  const auto result = launch({"--max_restarts=50", "--nproc_per_node=2", "sh", "-c",
                              "echo up; exec " + kAgentWorker + " heartbeat 4 fail $((RANK * 3))"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 1 failed (exit code 3) 3 times in a row at step 4: a restart "
                              "does not help"),
                    HasSubstr("restart 2 of 50"), Not(HasSubstr("restart 3 of 50"))));
}

TEST(LaunchRestartTest, ABudgetByTimeIsNamed) {
  const auto result = launch({"--max_restarts=1/1h", "sh", "-c", "exit 9"});
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("restart 1 (at most 1 within 1 h 0 min)"),
                    HasSubstr("no restart is left (--max_restarts=1 within 1 h 0 min)")));
}

// Failures before and after the group is formed. bench/recovery runs many more, also on two nodes.
TEST(LaunchRecoveryTest, OfPythonWorkersIsAtTheFirstRestart) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const auto result =
      run_program({std::string(SYNCBN_SOURCE_DIR) + "/bench/recovery", "--runs=2", "--workers=2",
                   "--launcher", kLauncher, "--python", python(), "--only", "standalone/python"},
                  {.timeout_seconds = 200});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 of 2"));
}

}  // namespace
}  // namespace syncbn::test

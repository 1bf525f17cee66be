// What remains of a job when its launcher, its keeper or its workers are killed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "launch/launcher.h"
#include "launch/leftovers.h"
#include "support/eventually.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

// A job whose processes end only by SIGKILL. Each worker has a child in the background, a child in
// its own session, and a grandchild whose parent has ended.
class StubbornJob : public MarkedJob {
 public:
  static constexpr size_t kWorkers = 3;
  static constexpr size_t kProcesses = kWorkers * 4;

  explicit StubbornJob(const Words& options = {}) {
    const std::string program = folder().write("stubborn",
                                               "#!/bin/sh\n"
                                               "trap '' TERM INT HUP\n"
                                               "sleep 1000 & setsid sleep 1000 & "
                                               "(setsid sleep 1000 &)\n"
                                               "exec sleep 1000\n",
                                               true);
    folder().write("report.json", R"({"exit_code": 0})");
    // At the front, so that a later --shutdown_timeout overrides it.
    start(Words{"--shutdown_timeout=1000", "--report=report.json"} + options +
          Words{fmt::format("--nproc_per_node={}", kWorkers), program});
    started_ = launcher().wait_until([this] { return count("sleep") == kProcesses; });
  }

  bool started() const { return started_; }

 private:
  bool started_ = false;
};

TEST(LaunchFaultTest, NothingOutlivesALauncherThatIsKilledWhateverItsKeeperDoes) {
  for (const int to_keeper : {0, SIGKILL, SIGSTOP}) {
    SCOPED_TRACE(to_keeper);
    StubbornJob job;
    ASSERT_TRUE(job.started());
    ASSERT_EQ(::kill(job.keeper(), to_keeper), 0);
    job.launcher().end_by(SIGKILL);
    EXPECT_EQ(job.left_over(), 0U);
    EXPECT_TRUE(to_keeper == SIGSTOP || job.temporaries_are_gone());
  }
}

TEST(LaunchFaultTest, NothingOutlivesAKeeperThatIsKilledAndTheLauncherSaysSo) {
  StubbornJob job;
  ASSERT_TRUE(job.started());
  ASSERT_EQ(::kill(job.keeper(), SIGKILL), 0);
  const auto result = job.launcher().wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("keeper"));
  EXPECT_EQ(job.left_over(), 0U);
  EXPECT_THAT(base::read_file(job.folder() / "report.json"), HasSubstr(R"("exit_code": 75,)"));
}

// `pkill -9 -f syncbn-launch` must not kill the processes that clean up.
TEST(LaunchFaultTest, NothingOutlivesWhatHasTheLaunchersName) {
  StubbornJob job;
  ASSERT_TRUE(job.started());
  for (const pid_t pid : job.processes()) {
    std::ifstream file(fmt::format("/proc/{}/cmdline", pid));
    std::string line;
    std::getline(file, line);
    if (line.find("syncbn-launch") != std::string::npos) {
      ASSERT_EQ(::kill(pid, SIGKILL), 0);
    }
  }
  EXPECT_EQ(job.launcher().wait().exit_code, 137);
  EXPECT_EQ(job.left_over(), 0U);
  EXPECT_TRUE(job.temporaries_are_gone());
}

TEST(LaunchFaultTest, WorkersThatIgnoreTheSignalAreKilledAfterTheGraceTime) {
  for (const int to_keeper : {0, SIGSTOP}) {
    StubbornJob job({"--shutdown_timeout=0.2"});
    ASSERT_TRUE(job.started());
    ASSERT_EQ(::kill(job.keeper(), to_keeper), 0);
    const auto result = job.launcher().end_by(SIGTERM);
    EXPECT_EQ(job.left_over(), 0U);
    if (to_keeper == SIGSTOP) continue;
    EXPECT_THAT(result.err, HasSubstr("killed"));
    EXPECT_TRUE(job.temporaries_are_gone());
  }
}

TEST(LaunchFaultTest, ASecondInterruptKillsAtOnce) {
  StubbornJob job;
  ASSERT_TRUE(job.started());
  job.launcher().send_signal(SIGINT);
  job.launcher().send_signal(SIGTERM);
  // The signal that is handled first determines the exit code.
  EXPECT_THAT(job.launcher().wait().exit_code, ::testing::AnyOf(130, 143));
  EXPECT_EQ(job.left_over(), 0U);
}

// A worker that starts these commands in the background, and succeeds once the file "go" exists.
class JobThatSucceeds : public MarkedJob {
 public:
  JobThatSucceeds(const std::string& commands, const std::string& shutdown_timeout) {
    start({"--shutdown_timeout=" + shutdown_timeout, "sh", "-c",
           commands + " while [ ! -e go ]; do sleep 0.01; done; exit 0"});
  }
};

TEST(LaunchFaultTest, HelpersThatDoNotEndGetSigtermThenSigkill) {
  JobThatSucceeds job(
      "(trap 'echo cleaned up; exit' TERM; touch up1; while :; do sleep 0.01; done) & "
      "(trap '' TERM; touch up2; exec tail -f /dev/null) & "
      "mkfifo unread; (exec setsid cat unread > /dev/null 2>&1) & ",
      "3");
  ASSERT_TRUE(job.launcher().wait_until(
      [&] { return job.has("up1") && job.count("tail") == 1 && job.count("cat") == 1; }));
  job.folder().write("go", "");
  const auto result = job.launcher().wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "cleaned up\n");
  EXPECT_THAT(result.err, AllOf(HasSubstr("still run after 3.0 s"), HasSubstr("tail (pid ")));
  EXPECT_EQ(job.count("tail"), 0U);
  EXPECT_EQ(job.count("cat"), 1U) << "a daemon goes on";
}

// Workers that print each signal that they catch.
constexpr const char* kCatching =
    "trap 'echo got INT; exit 0' INT; trap 'echo got TERM; exit 0' TERM; "
    "trap 'echo got HUP; exit 0' HUP; trap 'echo got QUIT; exit 0' QUIT; "
    "trap 'echo got USR1' USR1; echo ready; while true; do sleep 0.01; done";

TEST(LaunchFaultTest, ForwardsSignals) {
  const std::vector<std::pair<int, std::string>> signals{
      {SIGINT, "INT"}, {SIGTERM, "TERM"}, {SIGHUP, "HUP"}, {SIGQUIT, "QUIT"}};
  for (const auto& [signal, name] : signals) {
    MarkedJob job;
    Program& launcher = job.start({"--nproc_per_node=2", "sh", "-c", kCatching});
    launcher.wait_until([&] { return count(launcher.out(), "ready") == 2; });
    launcher.send_signal(SIGUSR1);  // does not end it
    launcher.wait_until([&] { return count(launcher.out(), "got USR1") == 2; });
    const auto result = launcher.end_by(signal);
    EXPECT_EQ(count(result.out, "got " + name), 2) << result.out;
    EXPECT_THAT(result.err, Not(HasSubstr("failed")));
    EXPECT_EQ(job.left_over(), 0U) << signal;
  }
}

// As in `syncbn-launch ... | less`.
TEST(LaunchFaultTest, ASignalEndsItWhileNobodyReadsItsOutput) {
  TempFolder folder;
  // First more than a pipe holds but less than the launcher keeps; then more than both.
  const std::string script = "yes | head -c 100000; touch written; exec yes";
  Program launcher(
      launch_command({"--shutdown_timeout=1000", "--nproc_per_node=2", "sh", "-c", script}),
      {.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder.path()});
  ASSERT_TRUE(eventually([&] { return fs::exists(folder / "written"); }));
  launcher.send_signal(SIGTERM);
  ASSERT_TRUE(eventually([&] { return state_of(launcher.pid()) == 'Z'; }));
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_THAT(result.out, ::testing::StartsWith("["));
}

TEST(LaunchFaultTest, SaysThatOutputWasLostOnAFullDisk) {
  const TempFolder folder;
  const auto result = run_program(
      {"sh", "-c", kLauncher + " --report=report.json seq 100 >/dev/full"}, {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("cannot write standard output: No space left on device"));
  EXPECT_THAT(base::read_file(folder / "report.json"), HasSubstr(R"("exit_code": 75,)"));
}

TEST(LaunchFaultTest, AStandardErrorThatCannotBeWrittenChangesNoOtherCode) {
  const auto run = [](const std::string& words) {
    return run_program({"sh", "-c", kLauncher + " " + words + " 2>/dev/full"},
                       {.unset = {"OMP_NUM_THREADS"}})
        .exit_code;
  };
  EXPECT_EQ(run("--rubbish true"), 2);
  EXPECT_EQ(run("no-such-program"), 127);
  EXPECT_EQ(run("sh -c 'echo lost >&2'"), 75);
  EXPECT_EQ(run("sh -c 'echo lost >&2; exit 4'"), 4);
}

TEST(LaunchFaultTest, AFileSizeLimitIsAnErrorOfTheWrite) {
  const TempFolder folder;
  const auto result = run_program(
      {"sh", "-c",
       "ulimit -f 20; " + kLauncher + " --nproc_per_node=2 sh -c 'seq 1 100000; exit 4' >out"},
      {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.err, HasSubstr("cannot write standard output: File too large"));
}

TEST(LaunchFaultTest, TakesTheDescriptorsThatItMayHaveAndLeavesTheWorkersLimit) {
  const auto result = run_program(
      {"sh", "-c",
       "ulimit -Sn 64; exec " + kLauncher + " --nproc_per_node=30 sh -c 'ulimit -Sn' 2>&1"});
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_EQ(count(result.out, "64\n"), 30) << result.out;
}

TEST(LaunchFaultTest, AReportThatCannotBeWrittenIsSaidBeforeAnythingStarts) {
  const TempFolder folder;
  for (const char* report : {"/proc/x", ".", "/"}) {
    const auto result = run_program({kLauncher, std::string("--report=") + report, "touch", "ran"},
                                    {.cwd = folder.path()});
    EXPECT_EQ(result.exit_code, 2) << report;
    EXPECT_THAT(result.err, HasSubstr(report));
    EXPECT_FALSE(std::filesystem::exists(folder / "ran"));
  }
  EXPECT_EQ(run_program({kLauncher, "--report=/dev/null", "true"}).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

// No worker starts, whichever descriptor cannot be opened.
TEST(LaunchFaultTest, SaysThatThereAreTooFewFileDescriptors) {
  int refused = 0;
  for (int most = 5; most < 64; ++most) {
    const auto result =
        run_program({"sh", "-c", fmt::format("ulimit -n {}; exec {} true", most, kLauncher)});
    if (result.exit_code == 0) break;
    ++refused;
    EXPECT_EQ(result.exit_code, 75) << most;
    EXPECT_THAT(result.err, HasSubstr(fmt::format(": Too many open files; this process may have {} "
                                                  "(ulimit -n): raise the limit",
                                                  most)));
  }
  EXPECT_GT(refused, 3);
}

TEST(LaunchFaultTest, HelpOnAFullDiskIsNoBug) {
  const auto result = run_program({"sh", "-c", kLauncher + " --help >/dev/full"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, AllOf(HasSubstr("standard output"), Not(HasSubstr("internal error"))));
  EXPECT_THAT(run_program({"sh", "-c", kLauncher + " --version >/dev/full"}).err,
              HasSubstr("cannot write standard output: No space left on device"));
}

TEST(LaunchFaultTest, AKeeperThatIsKilledAfterAFailureDoesNotHideIt) {
  TempFolder folder;
  Program launcher(launch_command({"--nproc_per_node=2", "sh", "-c",
                                   "trap '' TERM; touch up$RANK; [ $RANK = 1 ] && sleep 1000; "
                                   "while [ ! -e up1 ]; do sleep 0.01; done; exit 3"}),
                   {.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder.path()});
  ASSERT_TRUE(launcher.wait_for_err("waiting for 1 other worker"));
  ASSERT_EQ(::kill(keeper_of(launcher.pid()), SIGKILL), 0);
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, AllOf(HasSubstr("was killed; all workers have been killed"),
                                HasSubstr("rank 0 failed: exit code 3\n")));
}

}  // namespace
}  // namespace syncbn::test

// Signals during the start of many workers, and errors when the start reaches a limit.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "launch/launcher.h"
#include "launch/leftovers.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

/// Thirty workers: three start within a second, the last one after most of a minute.
class SlowStart : public MarkedJob {
 public:
  explicit SlowStart(std::map<std::string, std::string> env = {{"SLOW_STARTS_MS", "100"}}) {
    env["LD_PRELOAD"] = SYNCBN_SLOW_STARTS;
    start({"--nproc_per_node=30", "sh", "-c", "touch up$RANK; exec sleep 1000"}, std::move(env));
  }
};

TEST(LaunchStartTest, ASignalEndsIt) {
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    SlowStart job;
    ASSERT_TRUE(job.launcher().wait_until([&] { return job.has("up2"); }));
    EXPECT_THAT(job.launcher().end_by(signal).err,
                AllOf(Not(HasSubstr("pid 0")), Not(HasSubstr("left running"))));
    EXPECT_EQ(job.left_over(), 0U);
    EXPECT_FALSE(job.has("up29"));
    EXPECT_TRUE(job.temporaries_are_gone());
  }
}

TEST(LaunchStartTest, ALauncherThatIsKilledWhileItWaitsForItsReaderLeavesNothing) {
  TempFolder folder;
  fs::create_directory(folder / "tmp");
  // More than a pipe holds, less than the launcher keeps.
  Program launcher({kLauncher, "sh", "-c", "yes | head -c 100000; touch written"},
                   {.env = {{"TMPDIR", folder / "tmp"}}, .cwd = folder.path()});
  ASSERT_TRUE(eventually([&] { return fs::exists(folder / "written"); }));
  EXPECT_TRUE(eventually([&] { return fs::is_empty(folder / "tmp"); }));
  launcher.end_by(SIGKILL);
}

// If both gave up, each would wait for the other to lead.
TEST(LaunchStartTest, TwoLaunchersThatListenAtTheSameMomentTryAgain) {
  const auto command =
      launch_command({"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_conf=join_timeout=20",
                      fmt::format("--rdzv_endpoint=127.0.0.1:{}", free_port()), "true"});
  const RunProgramOptions options{
      .env = {{"LD_PRELOAD", SYNCBN_SLOW_STARTS}, {"SLOW_STARTS_LISTENS", "1"}}};
  Program one(command, options);
  Program other(command, options);
  for (Program* const program : {&one, &other}) {
    const auto result = program->wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST(LaunchStartTest, AProcessLimitThatIsReachedIsNamed) {
  // The first two forks are for the sentinel and the keeper, the others for the workers.
  for (const int forks : {0, 1, 2, 8}) {
    SlowStart job({{"SLOW_STARTS_FORKS", std::to_string(forks)}});
    const auto result = job.launcher().wait();
    EXPECT_EQ(result.exit_code, 75) << forks;
    const std::string what = forks < 2 ? "cannot start the keeper process"
                                       : fmt::format("cannot start rank {}", forks - 2);
    EXPECT_THAT(result.err, AllOf(HasSubstr(what + ": Resource temporarily unavailable"),
                                  HasSubstr("(ulimit -u)"), HasSubstr("raise the limit")));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_EQ(job.left_over(), 0U);
    EXPECT_TRUE(job.temporaries_are_gone());
  }
}

TEST(LaunchStartTest, ASentinelOrKeeperThatIsKilledAtItsStartIsNamed) {
  for (const std::string fork : {"0", "1"}) {
    SlowStart job({{"SLOW_STARTS_KILLED", fork}});
    const auto result = job.launcher().wait();
    EXPECT_EQ(result.exit_code, 75);
    EXPECT_EQ(result.err, "syncbn-launch: error: cannot start the keeper process: it was killed\n");
    EXPECT_EQ(job.left_over(), 0U);
    EXPECT_TRUE(job.temporaries_are_gone());
  }
}

TEST(LaunchStartTest, MoreWorkersThanTheCoresCanRunNeedAnOption) {
  // On one core, however many this machine has.
  const auto on_one_core = [](int workers, const std::string& option = "--nnodes=1") {
    return run_program({"taskset", "-c", "0", kLauncher, "--dry_run", option,
                        fmt::format("--nproc_per_node={}", workers), "true"});
  };
  EXPECT_EQ(on_one_core(32).exit_code, 0);
  const auto refused = on_one_core(33);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err,
              AllOf(HasSubstr("--nproc_per_node=33: this machine has 1 usable CPU for the workers"),
                    HasSubstr("more than 32 workers per "), HasSubstr("start at most "),
                    HasSubstr("--oversubscribe")));
  EXPECT_EQ(on_one_core(4096, "--oversubscribe").exit_code, 0);
}

std::string value_in(const std::string& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key)) return line.substr(key.size());
  }
  return "";
}

TEST(LaunchStartTest, TheKernelIsToKillWorkersForMemoryBeforeLauncherAndKeeper) {
  Program launcher(launch_command({"sh", "-c", "echo $$$$; exec sleep 1000"}));
  ASSERT_TRUE(launcher.wait_until([&] { return count(launcher.out(), "\n") == 1; }));
  const auto score = [](pid_t pid) {
    return std::atoi(value_in(fmt::format("/proc/{}/oom_score_adj", pid), "").c_str());
  };
  const pid_t keeper = keeper_of(launcher.pid());
  const int own = score(::getpid());
  EXPECT_EQ(score(launcher.pid()), own);
  EXPECT_EQ(score(keeper), own);
  EXPECT_EQ(score(std::atoi(launcher.out().c_str())), std::min(own + 300, 1000));

  char page = 0;
  SYNCBN_SKIP_UNLESS(::mlock(&page, 1) == 0, "mlock");
  const auto is_locked = [](pid_t pid) {
    return std::atoi(value_in(fmt::format("/proc/{}/status", pid), "VmLck:").c_str()) > 0;
  };
  // The launcher and the keeper lock their memory after the workers have started.
  EXPECT_TRUE(launcher.wait_until([&] { return is_locked(launcher.pid()) && is_locked(keeper); }));
}

}  // namespace
}  // namespace syncbn::test

#include "workers/keeper.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/signal_mask.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/processes.h"
#include "common/signals.h"
#include "support/eventually.h"

namespace syncbn::launch {
namespace {

TEST(KeeperTest, AnExceptionInItDoesNotReachTheLaunchersCode) {
  std::optional<Keeper> keeper;
  try {
    keeper.emplace(std::vector<WorkerSpec>{}, [] { throw std::runtime_error("in the keeper"); });
  } catch (const std::runtime_error&) {
    ::_exit(0);  // this is the keeper, in the launcher's frames
  }
  keeper.reset();  // closes the socket, as if the launcher had ended
  // A keeper that had unwound into our frames would exit with 0, and so would its sentinel.
  const pid_t sentinel = children_of(::getpid()).at(0);
  EXPECT_TRUE(syncbn::test::eventually([sentinel] { return children_of(sentinel).empty(); }));
  // A sentinel that did not wait would have ended by then.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(::waitpid(sentinel, nullptr, WNOHANG), 0) << "it waits for our end";
  kill_all_descendants();
}

// Also after a keeper that a signal ends when the launcher no longer reads its events.
TEST(KeeperTest, OneThatIsKilledWhileItFinishesKeepsNobodyWaiting) {
  become_subreaper();
  const std::vector<WorkerSpec> workers{
      {.file = "/bin/sleep", .argv = {"sleep", "1000"}, .env = {}}};
  {
    Keeper keeper(workers, [] {});
    ::kill(keeper.pid(), SIGKILL);
    keeper.finish(std::chrono::seconds(25));
    EXPECT_TRUE(keeper.gone());
  }
  EXPECT_TRUE(children_of(::getpid()).empty()) << "its sentinel waits for us";
}

TEST(KeeperTest, OrphansOfOthersAreReapedAndItsSentinelIsNot) {
  Keeper keeper({}, [] {});
  const std::vector<pid_t> sentinel = children_of(::getpid());
  const pid_t orphan = ::fork();  // of a `docker exec`: a child that nobody here waits for
  if (orphan == 0) ::_exit(0);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(orphan), &ended, WEXITED | WNOWAIT), 0);
  keeper.reap_orphans();
  EXPECT_EQ(children_of(::getpid()), sentinel);
  keeper.finish(std::chrono::seconds(25));
  keeper.reap_orphans();  // there are none
}

TEST(ProcessesTest, TheWaitForAChildHasALimit) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  EXPECT_EQ(wait_for_child(child, std::chrono::steady_clock::now()), 0);
  ::kill(child, SIGKILL);
  EXPECT_EQ(wait_for_child(child, std::chrono::steady_clock::time_point::max()), child);
  EXPECT_EQ(wait_for_child(child, std::chrono::steady_clock::now()), -1);
}

TEST(ExitStatusTest, SaysHowAProcessEnded) {
  EXPECT_EQ(ExitStatus{SIGSEGV}.in_words(), "killed by signal 11 (SIGSEGV, Segmentation fault)");
  EXPECT_EQ((ExitStatus{SIGKILL, true}.in_words()),
            "killed by signal 9 (SIGKILL, Killed), probably by the kernel's OOM killer (out of "
            "memory)");
  EXPECT_EQ(ExitStatus{40}.in_words(), "killed by signal 40");
  EXPECT_EQ(ExitStatus{138 << 8}.in_words(), "exit code 138");
  EXPECT_EQ(ExitStatus{}.in_words(), "cannot be started");
}

TEST(SignalsTest, AKeptMaskLetsThemActAgain) {
  const auto end_by_a_signal = [](bool keeps_mask) {
    std::optional<base::SignalMask> mask;
    if (keeps_mask) mask.emplace(SIG_BLOCK, std::initializer_list<int>{});
    const Signals signals({SIGTERM});
    ::raise(SIGTERM);
    mask.reset();
    ::_exit(0);
  };
  EXPECT_EXIT(end_by_a_signal(true), testing::KilledBySignal(SIGTERM), "");
  EXPECT_EXIT(end_by_a_signal(false), testing::ExitedWithCode(0), "");
}

// `timeout` sends its signal to its child and to their process group; a shell sends SIGHUP to its
// job when its terminal is closed, and the kernel when the shell ends.
TEST(SignalsTest, OneRequestToEndMayComeTwice) {
  for (const int second : {SIGTERM, SIGHUP}) {
    Signals signals({SIGTERM, SIGHUP});
    ::raise(SIGTERM);
    EXPECT_EQ(signals.next(), SIGTERM);
    ::raise(second);
    EXPECT_EQ(signals.next(), std::nullopt);
  }
}

// With `stty tostop`, a launcher in the background that writes would be stopped.
TEST(SignalsTest, AWriteToTheTerminalDoesNotStopTheLauncher) {
  const Signals signals({SIGTERM});
  struct sigaction now {};
  ::sigaction(SIGTTOU, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_IGN);
}

}  // namespace
}  // namespace syncbn::launch

// syncbn-launch on a terminal: a pseudo-terminal in the place of a person's.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "launch/launcher.h"
#include "support/eventually.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// A program whose stdin, stdout and stderr are a terminal of 60 columns, its controlling one.
class OnTerminal {
 public:
  explicit OnTerminal(const std::vector<std::string>& argv) {
    winsize size{};
    size.ws_col = 60;
    size.ws_row = 20;
    int master = -1;
    pid_ = ::forkpty(&master, nullptr, nullptr, &size);
    if (pid_ == 0) {
      ::setenv("TERM", "xterm", 1);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      ::unsetenv("NO_COLOR");
      std::vector<char*> words;
      words.reserve(argv.size() + 1);
      for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
      words.push_back(nullptr);
      ::execv(words[0], words.data());
      ::_exit(127);
    }
    master_.reset(master);
  }
  ~OnTerminal() {
    if (exit_code_ < 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;

  void type(const std::string& keys) {
    ASSERT_EQ(::write(master_.get(), keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }

  /// Reads until `words` have appeared on the screen.
  bool shows(const std::string& words) {
    while (screen_.find(words) == std::string::npos) {
      if (!read_more()) {
        ADD_FAILURE() << "never shown: " << words << "\n" << screen_;
        return false;
      }
    }
    return true;
  }

  /// Its exit code, after everything has been read.
  int wait() {
    while (read_more()) {
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return exit_code_;
  }

  const std::string& screen() const { return screen_; }

 private:
  bool read_more() {
    pollfd ready{master_.get(), POLLIN, 0};
    if (::poll(&ready, 1, 30'000) == 0) {
      ADD_FAILURE() << "nothing more on the terminal for 30 s\n" << screen_;
      ::kill(pid_, SIGKILL);
      return false;
    }
    char buffer[4096];
    const ssize_t got = ::read(master_.get(), buffer, sizeof(buffer));
    if (got <= 0) return false;  // EIO: all have closed it
    screen_.append(buffer, static_cast<size_t>(got));
    return true;
  }

  pid_t pid_ = -1;
  int exit_code_ = -1;
  base::UniqueFd master_;
  std::string screen_;
};

TEST(LaunchTerminalTest, DrawsRankZerosProgressBelowTheLines) {
  OnTerminal terminal(launch_command({"--nproc_per_node=2", kAgentWorker, "progress", "5", "10",
                                      "epoch 1", "nap", "print", "a line", "nap", "clear"}));
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_THAT(terminal.screen(), HasSubstr("[#######........] 5/10  50 %  epoch 1  0:00"));
  // Erased before the line, drawn again after it, gone at the end.
  EXPECT_THAT(terminal.screen(), HasSubstr("\r\x1b[K\x1b[36m[0] \x1b[0ma line\r\n[#######"));
  const size_t last_bar = terminal.screen().rfind("5/10");
  EXPECT_NE(terminal.screen().find("\r\x1b[K", last_bar), std::string::npos);
}

TEST(LaunchTerminalTest, CutsTheBarToTheTerminalsWidth) {
  OnTerminal terminal(
      launch_command({kAgentWorker, "progress", "5", "10", std::string(100, 'x').c_str(), "nap"}));
  EXPECT_EQ(terminal.wait(), 0);
  const size_t start = terminal.screen().find("[#######");
  ASSERT_NE(start, std::string::npos);
  EXPECT_EQ(terminal.screen().find('\r', start) - start, 59U);
}

TEST(LaunchTerminalTest, TellsWorkersTheTerminalsWidth) {
  OnTerminal terminal(launch_command({"sh", "-c", "echo columns $SYNCBN_AGENT_COLUMNS"}));
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_THAT(terminal.screen(), HasSubstr("columns 60\r\n"));
}

TEST(LaunchTerminalTest, ControlCEndsTheJob) {
  OnTerminal terminal(launch_command(
      {"--nproc_per_node=2", "sh", "-c", "echo ready; while true; do sleep 0.01; done"}));
  ASSERT_TRUE(terminal.shows("[1] \x1b[0mready"));
  ASSERT_TRUE(terminal.shows("[0] \x1b[0mready"));
  terminal.type("\x03");
  EXPECT_EQ(terminal.wait(), 130);
  EXPECT_THAT(terminal.screen(), AllOf(HasSubstr("ended by SIGINT"), Not(HasSubstr("failed"))));
}

// The worker loops without children: a shell whose vfork'ed child is stopped is in state D, not T.
TEST(LaunchTerminalTest, ControlZStopsTheWorkersAndFgContinuesThem) {
  TempFolder folder;
  OnTerminal terminal({"/bin/bash", "--norc", "--noprofile", "--noediting", "-i"});
  terminal.type("PS1='$ '; cd " + folder.path().string() + "\n" + kLauncher +
                " sh -c 'echo $$$$ > pid; echo re''ady; while [ ! -e go ]; do :; done; echo "
                "fi''nished'\n");
  ASSERT_TRUE(terminal.shows("ready\r\n"));
  terminal.type("\x1a");
  ASSERT_TRUE(terminal.shows("Stopped"));
  pid_t worker = 0;
  std::ifstream(folder / "pid") >> worker;
  EXPECT_TRUE(eventually([&] { return state_of(worker) == 'T'; }));
  terminal.type("touch go; fg\n");
  ASSERT_TRUE(terminal.shows("finished\r\n"));
  terminal.type("exit $?\n");
  EXPECT_EQ(terminal.wait(), 0);
}

TEST(LaunchTerminalTest, AJobInTheBackgroundTakesNoKeys) {
  TempFolder folder;
  OnTerminal terminal({"/bin/bash", "--norc", "--noprofile", "--noediting", "-i"});
  terminal.type("PS1='$ '; cd " + folder.path().string() + "\n" + kLauncher +
                " sh -c 'cat > eaten; touch ready' & \n");
  const bool ended = eventually([&] { return std::filesystem::exists(folder / "ready"); });
  EXPECT_TRUE(ended) << "it should find the end of its input at once";
  terminal.type("echo mi''ne\n");
  EXPECT_TRUE(terminal.shows("mine\r\n"));
  terminal.type("exit\n");
  terminal.wait();
}

}  // namespace
}  // namespace syncbn::test

// syncbn-launch on a pseudo-terminal.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "launch/launcher.h"
#include "launch/on_terminal.h"
#include "support/eventually.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchTerminalTest, DrawsRankZerosProgressBelowTheLines) {
  const TempFolder folder;
  const auto until = [&](const std::string& file) {
    return "; while [ ! -e " + (folder / file).string() + " ]; do sleep 0.01; done; ";
  };
  OnTerminal terminal(launch_command({"--nproc_per_node=2", "sh", "-c",
                                      kAgentWorker + " progress 5 10 'epoch 1'" + until("speak") +
                                          "echo a line" + until("end") + kAgentWorker + " clear"}));
  ASSERT_TRUE(terminal.shows("[###....]  5/10   50 %  epoch 1  0:"));
  // The launcher erases the bar before the line, draws it again after the line, and erases it at
  // the end.
  folder.write("speak", "");
  ASSERT_TRUE(terminal.shows("\r\x1b[K\x1b[36m[0] \x1b[0ma line\r\n[###....]"));
  folder.write("end", "");
  EXPECT_EQ(terminal.wait(), 0);
  const size_t last_bar = terminal.screen().rfind("5/10");
  EXPECT_NE(terminal.screen().find("\r\x1b[K", last_bar), std::string::npos);
}

TEST(LaunchTerminalTest, Rank0OfSeveralAsksAndReadsTheAnswer) {
  OnTerminal terminal(
      launch_command({"--nproc_per_node=2", "sh", "-c",
                      "printf 'name of '$RANK'? '; read name; echo \"$RANK read <$name>\""}));
  ASSERT_TRUE(terminal.shows("name of 0? "));
  terminal.type("bob\n");
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_THAT(terminal.screen(), AllOf(HasSubstr("0 read <bob>"), HasSubstr("1 read <>")));
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

// SIGHUP is ignored, as under nohup, while the output still goes to the terminal.
TEST(LaunchTerminalTest, ARunThatOutlivesItsTerminalSucceeds) {
  TempFolder folder;
  OnTerminal terminal({"/bin/sh", "-c",
                       "trap '' HUP; cd " + folder.path().string() + "; exec " + kLauncher +
                           " sh -c 'echo ready; while [ ! -e go ]; do sleep 0.01; done; "
                           "echo more; echo more >&2; touch finished'"});
  ASSERT_TRUE(terminal.shows("ready"));
  terminal.hang_up();
  folder.write("go", "");
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_TRUE(std::filesystem::exists(folder / "finished"));
}

// The worker has no child: a shell that waits for a stopped vfork'ed child is in state D, not T.
TEST(LaunchTerminalTest, ControlZStopsTheWorkersAndFgContinuesThem) {
  TempFolder folder;
  OnTerminal terminal({"/bin/bash", "--norc", "--noprofile", "--noediting", "-i"}, 60,
                      {{"LC_ALL", "C"}});
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

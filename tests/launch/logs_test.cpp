// The workers' output: log folder, redirects, tee, filters and prefixes.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "launch/launcher.h"
#include "support/eventually.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The only folder in `folder`.
fs::path only_folder(const fs::path& folder) {
  const std::vector<fs::directory_entry> entries(fs::directory_iterator(folder),
                                                 fs::directory_iterator{});
  EXPECT_EQ(entries.size(), 1U);
  return entries.empty() ? fs::path() : entries.front().path();
}

std::string text_of(const fs::path& file) {
  return base::read_file(file);
}

// Only a warning: one command line may serve nodes with different numbers of workers.
TEST(LaunchLogsTest, WarnsOfALocalRankThatIsNotThere) {
  const auto result = launch({"--nproc_per_node=2", "-t", "1:0", "-r", "9:0,1:0", "true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err,
            "syncbn-launch: warning: --redirects: there is no local rank 9; this node has 2 "
            "workers, from local rank 0\n");
}

TEST(LaunchLogsTest, TheReportHasTheLastLinesOfAStderrThatWentToAFile) {
  TempFolder folder;
  const auto result = launch({"--log_dir=" + folder.path().string(), "-r", "2", "sh", "-c",
                              "seq 100000 >&2; echo the reason >&2; exit 3"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, AllOf(HasSubstr("(its last 20 lines)"), HasSubstr("    99999\n"),
                                HasSubstr("    the reason\n"), Not(HasSubstr("    99981\n"))));
}

TEST(LaunchLogsTest, ShowsTheChosenLocalRanksOnlyAndTheReasonOfTheOthers) {
  TempFolder folder;
  const auto result = launch({"--nproc_per_node=2", "--local_ranks_filter=0",
                              "--log_dir=" + folder.path().string(), "-t", "1", "sh", "-c",
                              "[ $RANK = 0 ] && exec sleep 1000; echo out; echo why >&2; exit 3"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(text_of(only_folder(folder.path()) / "attempt_0/1/stdout.log"), "out\n");
  EXPECT_THAT(result.err, HasSubstr("    why\n"));
}

TEST(LaunchLogsTest, CopiesLinesThatAreFiltered) {
  TempFolder folder;
  launch({"--nproc_per_node=2", "--log_dir=" + folder.path().string(),
          "--duplicate_stdout_filters=apple,a,,b", "--duplicate_stderr_filters=bad", "sh", "-c",
          "[ $RANK = 1 ] && exit 0; echo an apple; echo a pear; echo a,b; echo bad >&2"});
  const fs::path attempt = only_folder(folder.path()) / "attempt_0";
  EXPECT_EQ(text_of(attempt / "filtered_stdout.log"), "[0] an apple\n[0] a,b\n");
  EXPECT_EQ(text_of(attempt / "filtered_stderr.log"), "[0] bad\n");
}

TEST(LaunchLogsTest, KeepsLogsWithoutALogDirWhenTheLauncherIsKilled) {
  TempFolder folder;
  Program launcher(launch_command({"-r", "1", "--event_log_handler=json", "sh", "-c",
                                   "echo precious; echo up >&2; exec sleep 1000"}),
                   {.env = {{"TMPDIR", folder.path()}}});
  ASSERT_TRUE(launcher.wait_until([&] { return launcher.err().ends_with("up\n"); }));
  const fs::path run = only_folder(folder.path());
  EXPECT_THAT(launcher.err(), HasSubstr("log files are in " + run.string()));
  const auto has_event = [&] {
    return text_of(run / "events.jsonl").find("worker_started") != std::string::npos;
  };
  ASSERT_TRUE(eventually(has_event));  // the worker may print before the launcher has its pid
  const pid_t keeper = keeper_of(launcher.pid());
  launcher.end_by(SIGKILL);
  // A keeper that still ran would remove the logs.
  ASSERT_TRUE(eventually([&] { return has_ended(keeper); }));
  EXPECT_EQ(text_of(run / "attempt_0/0/stdout.log"), "precious\n");
  EXPECT_TRUE(has_event());
}

constexpr const char* kFailsOnceWithAnErrorFile =
    "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; echo bad > $TORCHELASTIC_ERROR_FILE; exit 1";

TEST(LaunchLogsTest, ARunThatRecoversLeavesNoFolderBehind) {
  TempFolder folder;
  const auto result = launch({"--max_restarts=1", "sh", "-c", kFailsOnceWithAnErrorFile},
                             {.env = {{"TMPDIR", folder.path()}}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(LaunchLogsTest, ARunThatFailsKeepsTheErrorFileThatItsReportNames) {
  TempFolder folder;
  const auto result =
      launch({"sh", "-c", kFailsOnceWithAnErrorFile}, {.env = {{"TMPDIR", folder.path()}}});
  EXPECT_EQ(result.exit_code, 1);
  const fs::path file = only_folder(folder.path()) / "attempt_0/error_0.json";
  EXPECT_EQ(text_of(file), "bad\n");
  EXPECT_THAT(result.err, AllOf(HasSubstr("(from " + file.string() + ")"), HasSubstr("    bad\n")));
}

TEST(LaunchLogsTest, SaysThatALogFileCouldNotBeWritten) {
  TempFolder folder;
  // A limit on file sizes stands for a full disk. Neither kills the launcher.
  const auto result = run_program({"sh", "-c",
                                   "ulimit -f 8; trap '' XFSZ; exec " + kLauncher + " --log_dir=" +
                                       folder.path().string() + " -t 1 seq 100000 >/dev/null"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, AllOf(HasSubstr("stdout.log"), HasSubstr("File too large")));
}

// A FIFO that is not read stands for a file server that does not answer.
TEST(LaunchLogsTest, ALogThatCannotBeWrittenNowHoldsUpNothingElse) {
  constexpr size_t kBytes = 1'000'000;
  TempFolder folder;
  const std::string script = fmt::format(
      "cd {}; if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then head -c {} /dev/zero; exit 0; fi; "
      "next=$(dirname $TORCHELASTIC_ERROR_FILE)/../../attempt_1/0; mkdir -p $next; "
      "mkfifo $next/stdout.log; ln -s $next/stdout.log log; "
      "while [ ! -e go ]; do sleep 0.01; done; exit 1",
      folder.path().string(), kBytes);
  Program job(launch_command({"--max_restarts=1", "--log_dir=" + (folder / "logs").string(), "-t",
                              "1", "sh", "-c", script}),
              {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_TRUE(job.wait_until([&] { return fs::exists(folder / "log"); }));
  const base::UniqueFd log(::open((folder / "log").c_str(), O_RDONLY | O_NONBLOCK));
  folder.write("go", "");
  ASSERT_TRUE(job.wait_until([&] { return job.out().size() == kBytes; }));
  std::string written(kBytes, 'x');
  for (size_t got = 0; got < kBytes;) {
    ASSERT_TRUE(base::poll_until(log.get(), POLLIN, std::chrono::steady_clock::now() + kPromptly));
    const ssize_t bytes = ::read(log.get(), written.data() + got, kBytes - got);
    ASSERT_GT(bytes, 0) << got << " bytes, then " << job.err();
    got += static_cast<size_t>(bytes);
  }
  EXPECT_EQ(written, job.out());
  EXPECT_EQ(job.wait().exit_code, 0) << job.err();
}

// As with `2>&1 | less`: one pipe for both streams, and it is full before the reader begins.
TEST(LaunchLogsTest, LinesOfBothStreamsStayWholeForASlowReader) {
  const auto result = run_program(
      {"bash", "-c",
       kLauncher + " --nproc_per_node=2 --prefix='${rank} ' sh -c 'seq -f out%.0f 60000 & "
                   "seq -f err%.0f 60000 >&2; wait' 2>&1 | (sleep 0.2; cat) | "
                   "grep -c -x -E '[01] (out|err)[0-9]+'"},
      {.env = {{"OMP_NUM_THREADS", "1"}}});
  EXPECT_EQ(result.out, "240000\n");
}

TEST(LaunchLogsTest, SaysWhatIsWrongWithALogDir) {
  TempFolder folder;
  const std::string file = folder.write("file", "");
  const auto result = launch({"--log_dir=" + file + "/x", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("log folder"), HasSubstr("Not a directory")));
  EXPECT_EQ(launch({"--log_dir=/proc/x", "true"}).exit_code, 2);
}

TEST(LaunchLogsTest, DevNullTakesWhatNobodyWants) {
  TempFolder folder;
  const auto result =
      launch({"--log_dir=/dev/null", "-r", "3", "sh", "-c", "echo out; echo err >&2"},
             {.env = {{"TMPDIR", folder.path()}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out + result.err, "");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace syncbn::test

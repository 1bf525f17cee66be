// syncbn-launch from outside: what it passes to workers, and how it handles what they do.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "launch/launcher.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

TEST(LaunchTest, GivesEachWorkerTorchrunsVariables) {
  const auto result =
      launch({"--nproc_per_node=2", "--role=trainer", "sh", "-c", "[ $RANK = 1 ] && env || true"},
             {.unset = {"CUDA_VISIBLE_DEVICES"}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::map<std::string, std::string> env;
  for (const std::string& line : lines(result.out)) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) env[line.substr(4, equals - 4)] = line.substr(equals + 1);
  }
  const std::map<std::string, std::string> expected{
      {"RANK", "1"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_NAME", "trainer"},
      {"ROLE_RANK", "1"},
      {"ROLE_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_RUN_ID", "none"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "1"},
      {"SYNCBN_AGENT_VERSION", "1"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(env[name], value) << name;
  EXPECT_GT(std::atoi(env["MASTER_PORT"].c_str()), 0);
  EXPECT_NE(env["TORCHELASTIC_ERROR_FILE"], "");
  EXPECT_NE(env["SYNCBN_AGENT_FD"], "");
}

TEST(LaunchTest, SharesOutTheCoresAndSaysSoOnceUnlessTheUserChose) {
  const auto shared = run_program(
      launch_command({"--nproc_per_node=2", "sh", "-c", "echo threads $OMP_NUM_THREADS"}),
      {.unset = {"OMP_NUM_THREADS"}});
  EXPECT_EQ(count(shared.err, "OMP_NUM_THREADS"), 1) << shared.err;
  EXPECT_THAT(shared.out, Not(HasSubstr("threads \n")));
  const auto single = run_program(launch_command({"sh", "-c", "echo threads $OMP_NUM_THREADS."}),
                                  {.unset = {"OMP_NUM_THREADS"}});
  EXPECT_EQ(single.out, "threads .\n");
  EXPECT_EQ(single.err, "");
  const auto chosen = launch({"--nproc_per_node=2", "sh", "-c", "echo $OMP_NUM_THREADS"},
                             {.env = {{"OMP_NUM_THREADS", "7"}}});
  EXPECT_EQ(chosen.err, "");
  EXPECT_THAT(lines(chosen.out), UnorderedElementsAre("[0] 7", "[1] 7"));
}

TEST(LaunchTest, PassesArgumentsUntouched) {
  const std::vector<std::string> odd{"two words", "it's",   "\"",       "$(echo x)",
                                     "$HOME",     "",       "--help",   "--nproc_per_node=3",
                                     "-m",        "back\\", "new\nline"};
  std::vector<std::string> words{"sh", "-c", "printf '<%s>' \"$@\"", "sh"};
  words.insert(words.end(), odd.begin(), odd.end());
  std::string expected;
  for (const std::string& word : odd) expected += "<" + word + ">";
  const auto result = launch(words);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, expected);
}

TEST(LaunchTest, ReturnsEachOf256ExitCodes) {
  for (int code = 0; code < 256; ++code) {
    EXPECT_EQ(launch({"sh", "-c", fmt::format("exit {}", code)}).exit_code, code);
  }
}

TEST(LaunchTest, Returns128PlusTheSignalThatKilledAWorker) {
  for (const int signal : {1, 2, 6, 8, 9, 11, 13, 15}) {
    const auto result = launch({"sh", "-c", fmt::format("kill -{} $$$$", signal)});
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_THAT(result.err, HasSubstr(fmt::format("killed by signal {} (SIG", signal)));
  }
}

TEST(LaunchTest, GivesWorkersNoDescriptorsButTheirOwn) {
  // The caller has left descriptor 9 open.
  const auto result =
      run_program({"sh", "-c", kLauncher + " sh -c 'ls /proc/$$$$/fd' 9</dev/null"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto agent =
      launch({"sh", "-c", "[ -p /proc/$$$$/fd/$SYNCBN_AGENT_FD ] && echo $SYNCBN_AGENT_FD"});
  EXPECT_EQ(lines(agent.out).size(), 1U);
  std::set<std::string> fds;
  for (const std::string& fd : lines(result.out)) fds.insert(fd);
  const auto record = launch({"sh", "-c", "readlink /proc/$$$$/fd/$SYNCBN_FLIGHT_FD"});
  EXPECT_THAT(record.out, HasSubstr("/memfd:syncbn-flight"));
  const auto secret = launch({"sh", "-c", "readlink /proc/$$$$/fd/$SYNCBN_SECRET_FD"});
  EXPECT_THAT(secret.out, HasSubstr("/memfd:syncbn-secret"));
  EXPECT_EQ(fds.size(), 6U) << result.out;
  EXPECT_THAT(fds, AllOf(::testing::Contains("0"), ::testing::Contains("1"),
                         ::testing::Contains("2"), Not(::testing::Contains("9"))));
}

TEST(LaunchTest, ResetsSignalsForWorkers) {
  const auto result = run_program(
      {"sh", "-c",
       "trap '' INT PIPE; exec " + kLauncher + " grep -E 'Sig(Blk|Ign)' /proc/self/status"});
  // glibc reserves signals 32 and 33, so a program that inherits them as ignored cannot reset them.
  EXPECT_THAT(result.out, ::testing::MatchesRegex("SigBlk:\t0+\nSigIgn:\t0000000(18|00)0000000\n"));
}

TEST(LaunchTest, EndsWithItsWorkersWhenStartedWithChildSignalsIgnored) {
  // Not through a shell: shells do not pass on an ignored SIGCHLD.
  constexpr char kIgnoreAndRun[] = R"(
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
)";
  const auto result =
      run_program({"python3", "-c", kIgnoreAndRun, kLauncher, "sh", "-c", "exit 3"});
  EXPECT_EQ(result.exit_code, 3);
}

TEST(LaunchTest, Rank0OrAnotherReadsTheLaunchersInput) {
  const auto typed = [](const std::string& options) {
    return run_program(
               {"sh", "-c", "echo typed | " + kLauncher + " --prefix='[${rank}] ' " + options},
               {.env = {{"OMP_NUM_THREADS", "1"}}})
        .out;
  };
  EXPECT_EQ(typed("cat"), "typed\n");
  EXPECT_EQ(typed("--nproc_per_node=3 cat"), "[0] typed\n");
  EXPECT_EQ(typed("--nproc_per_node=3 --stdin=2 cat"), "[2] typed\n");
  EXPECT_EQ(typed("--nproc_per_node=3 --stdin=none cat"), "");
}

TEST(LaunchTest, KeepsStdoutAndStderrApartAndLinesWhole) {
  const auto result = launch({"--nproc_per_node=4", "sh", "-c",
                              "i=0; while [ $i -lt 200 ]; do printf 'a'; printf 'b%s\\n' $RANK; "
                              "echo e$RANK >&2; i=$((i+1)); done; printf last"});
  ASSERT_EQ(result.exit_code, 0);
  std::map<std::string, int> seen;
  for (const std::string& line : lines(result.out)) ++seen[line];
  std::map<std::string, int> expected;
  for (int rank = 0; rank < 4; ++rank) {
    expected[fmt::format("[{0}] ab{0}", rank)] = 200;
    expected[fmt::format("[{}] last", rank)] = 1;
  }
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(lines(result.err).size(), 800U);
}

TEST(LaunchTest, RunsWithoutStandardStreams) {
  TempFolder folder;
  const auto result = run_program(
      {"sh", "-c", kLauncher + " sh -c 'cat; echo x; echo y >&2; touch finished' <&- >&- 2>&-"},
      {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(folder / "finished"));
}

TEST(LaunchTest, PassesOnMuchOutputToItsLastByte) {
  const auto result = launch({"--nproc_per_node=2", "sh", "-c", "yes 0123456789 | head -n 300000"});
  EXPECT_EQ(result.out.size(), 2U * 300000 * (11 + 4));
}

TEST(LaunchTest, DoesNotWaitForAGrandchildThatHoldsThePipe) {
  const auto result = launch({"--shutdown_timeout=0.1", "sh", "-c", "sleep 1000 & echo started"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "started\n");
}

TEST(LaunchTest, ReportsTheFirstFailureOnceAndEndsTheRest) {
  // Rank 1 fails once the others are running. They then print a line, so that rank 1's output is
  // not the last one.
  TempFolder folder;
  const auto result =
      launch({"--nproc_per_node=3", "sh", "-c",
              "trap 'echo noise >&2; exit 0' TERM; touch up$RANK; "
              "if [ $RANK = 1 ]; then while [ ! -e up0 ] || [ ! -e up2 ]; do sleep 0.01; done; "
              "echo 'the reason' >&2; exit 9; fi; sleep 1000 & wait"},
             {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_EQ(count(result.err, "rank 1 failed"), 1) << result.err;
  EXPECT_EQ(count(result.err, "syncbn-launch:"), 1) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("exit code 9"), HasSubstr("local rank 1"),
                                HasSubstr("then ended  rank 0"), HasSubstr("pid "),
                                HasSubstr("    the reason\n")));
}

TEST(LaunchTest, NotesTheFirstFailureInAWorkersLogAndSaysHowToContinue) {
  TempFolder folder;
  folder.write("run.jsonl", "{}\n{\"cut");
  // Rank 1 has the actual failure, and the log is rank 0's.
  const auto result = launch(
      {"--nproc_per_node=2", "sh", "-c",
       R"(if [ $RANK = 0 ]; then "$0" log run.jsonl resume 'train runs/x'; touch up; exec sleep 1000; fi
while [ ! -e up ]; do sleep 0.01; done
printf '%s' '{"message": "the reason\nin two lines"}' > $TORCHELASTIC_ERROR_FILE; exit 9)",
       kAgentWorker},
      {.env = {{"TMPDIR", folder.path()}}, .cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_THAT(result.err,
              EndsWith("syncbn-launch: to resume from the last checkpoint: train runs/x\n"));
  const std::string log = base::read_file(folder / "run.jsonl");
  EXPECT_THAT(log, StartsWith("{}\n{\"cut\n{\"event\":\"end\",\"time\":1"));
  EXPECT_THAT(log, EndsWith(",\"reason\":\"an error: rank 1 failed: exit code 9: the reason\"}\n"));
}

TEST(LaunchTest, LeavesAWorkerWhatItCanNoteItself) {
  const auto after = [](const std::string& end) {
    TempFolder folder;
    folder.write("run.jsonl", "");
    const auto result =
        launch({"--max_restarts=1", "sh", "-c",
                R"("$0" log run.jsonl resume 'train runs/x'; )" + end, kAgentWorker},
               {.env = {{"TMPDIR", folder.path()}}, .cwd = folder.path()});
    const bool says = count(result.err, "to resume from the last checkpoint: train runs/x\n") == 1;
    return std::pair(says, base::read_file(folder / "run.jsonl"));
  };
  EXPECT_EQ(after("exit 9"), std::pair(true, std::string()));
  EXPECT_EQ(after("exit 85"), std::pair(false, std::string())) << "it has said it";
  EXPECT_FALSE(after("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $$$$").first)
      << "the restart succeeded";
  const std::string end = R"({"event":"end","reason":"finished"})";
  EXPECT_EQ(after("echo '" + end + "' > run.jsonl; kill -9 $$$$").second, end + "\n");
  const auto [says, log] = after("kill -9 $$$$");
  EXPECT_TRUE(says);
  EXPECT_THAT(log,
              EndsWith("\"an error: rank 0 failed: killed by signal 9 (SIGKILL, Killed)\"}\n"));
}

TEST(LaunchTest, SaysThatItsOptionsStandBeforeTheProgram) {
  const auto result = launch({"sh", "-c", "exit 2", "sh", "--log_dir=x", "--max-restarts=3"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err,
              EndsWith("syncbn-launch: --max-restarts went to sh: the launcher's options come "
                       "before the program\n"));
}

TEST(LaunchTest, LeavesNoTemporaryFiles) {
  TempFolder folder;
  const auto result = launch({"--nproc_per_node=2", "sh", "-c",
                              "[ $RANK = 1 ] && exec sleep 1000; echo 'the reason' >&2; exit 3"},
                             {.env = {{"TMPDIR", folder.path()}}});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(count(result.err, "the reason\n"), 1) << result.err;  // it was the last line
  EXPECT_THAT(result.err, AllOf(Not(HasSubstr("(its last")),
                                HasSubstr("then ended  rank 1 (killed by signal 15")));
}

TEST(LaunchTest, RunsPythonScriptsAndModulesUnbuffered) {
  TempFolder folder;
  folder.write("script.py", "import sys; print('script', sys.argv[1:], sys.stdout.write_through)");
  folder.write("tool.py", "import sys; print('module', __name__, sys.argv[1:])");
  EXPECT_EQ(launch({"script.py", "-m", "x"}, {.cwd = folder.path()}).out,
            "script ['-m', 'x'] True\n");
  EXPECT_EQ(launch({"-m", "tool", "--a"}, {.cwd = folder.path()}).out, "module __main__ ['--a']\n");
  folder.write("fake-python", "#!/bin/sh\necho fake \"$@\"\n", true);
  EXPECT_EQ(launch({"script.py"},
                   {.env = {{"PYTHON_EXEC", folder / "fake-python"}}, .cwd = folder.path()})
                .out,
            "fake -u script.py\n");
  EXPECT_THAT(
      launch({"script.py"}, {.env = {{"PYTHON_EXEC", "/no/python"}}, .cwd = folder.path()}).err,
      HasSubstr("environment variable PYTHON_EXEC=/no/python: program not found"));
}

TEST(LaunchTest, ALoopOfLinksIsNotCalledMissing) {
  TempFolder folder;
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto result = launch({"./loop"}, {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_EQ(result.err,
            "syncbn-launch: error: program not found: ./loop: Too many levels of symbolic links\n");
}

TEST(LaunchTest, ExpandsTheLocalRankInArguments) {
  const auto result = launch({"--nproc_per_node=2", "echo", "$local_rank", "a${local_rank}b",
                              "$local_ranks", "$$", "$other", "cost$"});
  EXPECT_THAT(lines(result.out), UnorderedElementsAre("[0] 0 a0b $local_ranks $ $other cost$",
                                                      "[1] 1 a1b $local_ranks $ $other cost$"));
}

TEST(LaunchTest, PutsTheLocalRankBeforeTheArgumentsAsTheOldLauncherDid) {
  TempFolder folder;
  folder.write("old.py", "import sys; print(*sys.argv)");
  std::filesystem::create_symlink(kLauncher, folder / "torch.distributed.launch");
  const auto result = run_program({folder / "torch.distributed.launch", "--prefix=[${rank}] ",
                                   "--nproc_per_node=2", "old.py", "--epochs", "3"},
                                  {.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder.path()});
  EXPECT_THAT(lines(result.out), UnorderedElementsAre("[0] old.py --local-rank=0 --epochs 3",
                                                      "[1] old.py --local-rank=1 --epochs 3"));
  EXPECT_EQ(launch({"--no_use_env", "--local_rank_arg=--local_rank", "echo", "x"}).out,
            "--local_rank=0 x\n");
}

TEST(LaunchTest, SpellsTheLocalRankAsTheScriptDoes) {
  TempFolder folder;
  folder.write("old.py",
               "import argparse\n"
               "parser = argparse.ArgumentParser()\n"
               "parser.add_argument('--local_rank', type=int, default=-1)\n"
               "print(parser.parse_args().local_rank)\n");
  const RunProgramOptions in_folder{.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder.path()};
  EXPECT_EQ(launch({"--no_use_env", "old.py"}, in_folder).out, "0\n");
  EXPECT_EQ(
      launch({"--no_use_env", "--local_rank_arg=--local-rank", "old.py"}, in_folder).exit_code, 2);
  const auto without = launch({"old.py"}, in_folder);
  EXPECT_EQ(without.out, "-1\n");
  EXPECT_THAT(without.err, HasSubstr("old.py declares --local_rank and does not get it: start with "
                                     "--no_use_env, or read LOCAL_RANK"));
  EXPECT_EQ(launch({"--use_env", "old.py"}, in_folder).err, "");
}

TEST(LaunchTest, TakesThePythonOfTheFolderInWhichItHasALink) {
  TempFolder folder;
  folder.write("python3", "#!/bin/sh\necho python of the environment\n", true);
  folder.write("script.py", "");
  std::filesystem::create_symlink(kLauncher, folder / "torchrun");
  const RunProgramOptions in_folder{.cwd = folder.path()};
  EXPECT_EQ(run_program({folder / "torchrun", "script.py"}, in_folder).out,
            "python of the environment\n");
  EXPECT_EQ(
      run_program({"sh", "-c", "PATH=$PATH:" + folder.path().string() + " torchrun script.py"},
                  in_folder)
          .out,
      "python of the environment\n");
  EXPECT_EQ(run_program({kLauncher, "script.py"}, in_folder).out, "");
}

// Otherwise two launchers that were meant as two runs would silently form one job.
TEST(LaunchTest, SaysWhatItHasTakenFromTheScheduler) {
  const auto result = launch({"--rdzv_conf=join_timeout=1", "true"},
                             {.env = {{"SLURM_STEP_NUM_NODES", "2"},
                                      {"SLURM_NODEID", "0"},
                                      {"SLURM_STEP_NODELIST", "localhost,other"},
                                      {"SLURM_JOB_ID", std::to_string(::getpid())}}});
  EXPECT_THAT(result.err,
              HasSubstr("one run on 2 nodes, according to SLURM; node 0 is localhost:"));
}

TEST(LaunchTest, RunsAScriptThroughRunpy) {
  TempFolder folder;
  const std::string script = folder.write("s.py", "import sys; print(__name__, sys.argv)");
  EXPECT_EQ(launch({"--run_path", script, "--a", "1"}).out,
            "__main__ ['" + script + "', '--a', '1']\n");
}

TEST(LaunchTest, GivesEachWorkerItsGpuAsTheOnlyOne) {
  const auto result = launch({"--nproc_per_node=2", "--virtual-local-rank", "sh", "-c",
                              "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES $SYNCBN_GPU_PER_WORKER"},
                             {.env = {{"CUDA_VISIBLE_DEVICES", "5,GPU-7"}}});
  EXPECT_THAT(lines(result.out), UnorderedElementsAre("[0] 0 5 1", "[1] 0 GPU-7 1"));
}

TEST(LaunchTest, RunsAScriptAsItIsWithNoPython) {
  TempFolder folder;
  folder.write("x.py", "#!/bin/sh\necho shell\n", true);
  EXPECT_EQ(launch({"--no_python", "./x.py"}, {.cwd = folder.path()}).out, "shell\n");
}

TEST(LaunchTest, FindsProgramsBesideItselfFirstThenInPath) {
  TempFolder folder;
  std::filesystem::create_directory(folder / "bin");
  std::filesystem::create_directory(folder / "path");
  std::filesystem::copy_file(kLauncher, folder / "bin/syncbn-launch");
  folder.write("bin/tool", "#!/bin/sh\necho beside\n", true);
  folder.write("path/tool", "#!/bin/sh\necho in path\n", true);
  folder.write("path/other", "#!/bin/sh\necho other\n", true);
  const std::string path = (folder / "path").string() + ":/usr/bin:/bin";
  const std::string launcher = folder / "bin/syncbn-launch";
  EXPECT_EQ(run_program({launcher, "tool"}, {.env = {{"PATH", path}}}).out, "beside\n");
  EXPECT_EQ(run_program({launcher, "other"}, {.env = {{"PATH", path}}}).out, "other\n");
}

TEST(LaunchTest, SaysOnceWhyAProgramCannotRun) {
  TempFolder folder;
  folder.write("plain", "not executable");
  folder.write("main.cpp", "int main() {}");
  folder.write("odd", "no interpreter line", true);
  folder.write("lost", "#!/no/such/interpreter\n", true);
  const auto expect_error = [&](const std::string& program, int code, const std::string& reason) {
    const auto result = launch({"--nproc_per_node=3", program}, {.cwd = folder.path()});
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(reason));
    EXPECT_EQ(lines(result.err).size(), 1U) << result.err;
  };
  expect_error("no-such-program", 127, "beside syncbn-launch");
  expect_error("./no-such-program", 127, "no file ./no-such-program");
  expect_error("no-such.py", 127, "no Python script no-such.py");
  expect_error("plain", 127, "write ./plain");
  expect_error("./plain", 126, "not executable");
  expect_error("syncbn-lanch", 127, "did you mean 'syncbn-launch'?");
  expect_error("./main.cpp", 126, "main.cpp is a source file; build it");
  expect_error(folder.path(), 126, "is a folder");
  expect_error("./odd", 126, "#!");
  expect_error("./lost", 127, "interpreter");
}

TEST(LaunchTest, RefusesBadOptionsWithOneLine) {
  for (const char* option : {"--nproc_per_node=0", "--nonsense", "--nnodes=2"}) {
    const auto result = launch({option, "true"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(lines(result.err).size(), 1U) << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(LaunchTest, PrintsThePlanOfADryRun) {
  TempFolder folder;
  const auto result =
      launch({"--nproc_per_node=2", "--master-port=29511", "--dry-run", "touch", "a file"},
             {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const auto plan = lines(result.out);
  ASSERT_EQ(plan.size(), 6U) << result.out;
  EXPECT_THAT(plan[0], AllOf(StartsWith("# node 0 of 1, host "),
                             EndsWith(": 2 workers, ranks 0 to 1 of 2")));
  EXPECT_THAT(plan[1], AllOf(StartsWith("export "), HasSubstr(" MASTER_PORT=29511 "),
                             HasSubstr(" WORLD_SIZE=2"), Not(HasSubstr("RANK=1 "))));
  EXPECT_EQ(plan[4], "# rank 1, local rank 1");
  EXPECT_THAT(plan[5],
              AllOf(StartsWith("LOCAL_RANK=1 RANK=1 ROLE_RANK=1 /"), EndsWith("/touch 'a file'")));
}

TEST(LaunchTest, PlansWhatAShellCanDoByHand) {
  const std::vector<std::string> words{"--nproc_per_node=2",
                                       "--prefix=off",
                                       "--bind=none",
                                       "sh",
                                       "-c",
                                       "echo $RANK $WORLD_SIZE $ROLE_NAME \"$1\"",
                                       "sh",
                                       "it's $local_rank"};
  auto plan = words;
  plan.insert(plan.begin(), {"--dry_run", "--role=a b"});
  auto really = words;
  really.insert(really.begin(), "--role=a b");
  const auto by_hand = run_program({"sh", "-c", launch(plan).out});
  EXPECT_EQ(by_hand.out, "0 2 a b it's 0\n1 2 a b it's 1\n") << by_hand.err;
  EXPECT_THAT(lines(launch(really).out), UnorderedElementsAreArray(lines(by_hand.out)));
}

TEST(LaunchTest, SaysWhatAPlanForSeveralNodesTakesForGranted) {
  const auto plan = launch({"--nnodes=3", "--node_rank=2", "--master_addr=box",
                            "--nproc_per_node=4", "--dry_run", "true"})
                        .out;
  EXPECT_THAT(lines(plan).front(), AllOf(StartsWith("# node 2 of 3"),
                                         EndsWith("ranks 8 to 11 of 12 (if 3 nodes take part, each "
                                                  "with --nproc_per_node=4 as this one)")));
}

TEST(LaunchTest, PlansWithTheCoresOfEachWorker) {
  const auto result =
      run_program({"taskset", "-c", "0", kLauncher, "--bind=cores", "--dry_run", "true"});
  SYNCBN_SKIP_UNLESS(result.exit_code == 0, "cpu-0");
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("# rank 0, local rank 0, CPU 0\n"), HasSubstr("taskset -c 0 /")));
}

TEST(LaunchTest, DrawsNoProgressWithoutATerminalAndSurvivesGarbage) {
  const auto result = launch({"--nproc_per_node=2", kAgentWorker, "garbage", "not a record",
                              "progress", "1", "2", "epoch 1", "print", "line", "clear"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(lines(result.out), UnorderedElementsAre("[0] line", "[1] line"));
}

TEST(LaunchTest, GoesOnWhenNobodyReadsItsOutput) {
  TempFolder folder;
  const auto result = run_program(
      {"sh", "-c",
       kLauncher + " sh -c 'i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done; touch "
                   "finished' | head -n 1"},
      {.cwd = folder.path()});
  EXPECT_EQ(result.out, "line 0\n");
  EXPECT_TRUE(std::filesystem::exists(folder / "finished"));
}

TEST(LaunchTest, DoesNotLinkLibtorch) {
  const auto result = run_program({"ldd", kLauncher});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("libc.so"));
  EXPECT_THAT(result.out, AllOf(Not(HasSubstr("torch")), Not(HasSubstr("libc10"))));
}

TEST(LaunchTest, AWorkerDoesNotTakeAnOuterLaunchersBarForOurs) {
  const auto result =
      launch({"sh", "-c", "echo bar=$SYNCBN_AGENT_BAR"}, {.env = {{"SYNCBN_AGENT_BAR", "1"}}});
  EXPECT_EQ(result.out, "bar=\n");
}

TEST(LaunchTest, WritesAReportInJson) {
  TempFolder folder;
  const std::string file = folder / "report.json";
  launch({"--report=" + file, "true"});
  EXPECT_EQ(nlohmann::json::parse(base::read_file(file)),
            nlohmann::json::parse(R"({"exit_code": 0, "restarts": 0, "failure": null})"));
  launch({"--report", file, "--max_restarts=1", "--nproc_per_node=2", "sh", "-c",
          "[ $RANK = 0 ] && exec sleep 1000; echo why >&2; kill -SEGV $$$$"});
  const auto report = nlohmann::json::parse(base::read_file(file));
  EXPECT_EQ(report["exit_code"], 139);
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_EQ(report["failure"]["rank"], 1);
  EXPECT_EQ(report["failure"]["signal"], 11);
  EXPECT_THAT(report["failure"]["command"][0].get<std::string>(), EndsWith("/sh"))
      << "which of several it was";
  EXPECT_EQ(report["failure"]["ended"].size(), 1U);
}

// The printed report leaves out output that is printed directly above it.
TEST(LaunchTest, ReportsInJsonHaveTheLastLinesThatWereShown) {
  TempFolder folder;
  const std::string report = folder / "report.json";
  const std::string events = folder / "events.jsonl";
  const auto result = launch({"--report=" + report, "--event_log_handler=json:" + events, "sh",
                              "-c", "echo bad >&2; exit 3"});
  EXPECT_EQ(count(result.err, "bad\n"), 1);
  const auto tail = nlohmann::json::array({"bad"});
  EXPECT_EQ(nlohmann::json::parse(base::read_file(report))["failure"]["stderr_tail"], tail);
  EXPECT_THAT(base::read_file(events), HasSubstr(R"("stderr_tail":["bad"])"));
}

TEST(LaunchTest, ALongErrorMessageIsCutAndItsFileNamed) {
  TempFolder folder;
  const std::string report = folder / "report.json";
  const auto result =
      launch({"--report=" + report, "--log_dir=" + (folder / "logs").string(), "sh", "-c",
              "yes bad | head -c 1000000 > $TORCHELASTIC_ERROR_FILE; exit 3"});
  EXPECT_LE(count(result.err, "bad\n"), 40);
  EXPECT_THAT(result.err,
              HasSubstr("    [cut here; the full message is in " + folder.path().string()));
  const auto failure = nlohmann::json::parse(base::read_file(report))["failure"];
  const std::string message = failure["error_message"];
  EXPECT_GT(count(message, "bad\n"), 1000);
  EXPECT_LT(message.size(), 70'000U);
  const std::string file = failure["error_file"];
  EXPECT_THAT(message, EndsWith("[cut here; the full message is in " + file + "]"));
  EXPECT_EQ(std::filesystem::file_size(file), 1'000'000U);
}

TEST(LaunchTest, AReportThatCannotBeWrittenChangesNoExitCode) {
  const TempFolder folder;
  const auto result = launch({"--report=gone/report", "sh", "-c", "rmdir gone; touch gone; exit 5"},
                             {.cwd = folder.path()});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("--report: cannot"));
}

/// A control group (version 1) with little memory.
class SmallMemory {
 public:
  SmallMemory() : folder_(fmt::format("/sys/fs/cgroup/memory/syncbn-test-{}", ::getpid())) {
    std::error_code error;
    available_ = std::filesystem::create_directory(folder_, error) && !error;
    if (!available_) return;
    std::ofstream(folder_ + "/memory.limit_in_bytes") << "256M";
    available_ = std::filesystem::exists(folder_ + "/memory.oom_control");
  }
  ~SmallMemory() {
    std::error_code ignored;
    std::filesystem::remove(folder_, ignored);
  }
  SmallMemory(const SmallMemory&) = delete;
  SmallMemory& operator=(const SmallMemory&) = delete;
  bool available() const { return available_; }
  std::string processes() const { return folder_ + "/cgroup.procs"; }

 private:
  std::string folder_;
  bool available_ = false;
};

TEST(LaunchTest, TellsAnOutOfMemoryKillFromAnother) {
  const SmallMemory memory;
  SYNCBN_SKIP_UNLESS(memory.available(), "cgroup");
  const auto result = run_program({"sh", "-c",
                                   "echo $$ > " + memory.processes() + "; exec " + kLauncher +
                                       " python3 -c 'x = bytearray(1000 << 20)'"});
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err, HasSubstr("OOM killer"));
  EXPECT_THAT(launch({"sh", "-c", "kill -KILL $$$$"}).err, Not(HasSubstr("OOM killer")));
}

}  // namespace
}  // namespace syncbn::test

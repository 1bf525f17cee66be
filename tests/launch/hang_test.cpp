// Workers that make no progress: how the launcher finds, explains and ends them, what it does not
// consider a hang, and what `syncbn-launch status` prints.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/unique_fd.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "job/hang.h"
#include "job/status_socket.h"
#include "job/stragglers.h"
#include "job/worker_state.h"
#include "launch/launcher.h"
#include "launch/nodes.h"
#include "support/eventually.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::test {
namespace {

using launch::find_culprit;
using launch::WorkerState;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Long enough that a worker which waits for a processor is not considered hung.
constexpr const char* kTimeout = "--hang_timeout=5";
// For jobs in which one worker hangs anyway.
constexpr const char* kShortTimeout = "--hang_timeout=2";
// If a worker still runs after this time, the launcher will not end it.
constexpr std::chrono::seconds kMuchLonger{8};

/// Runs the agent worker with these arguments on each rank.
std::vector<std::string> worker(const std::string& arguments) {
  return shell("exec " + kAgentWorker + " " + arguments);
}

// The launcher turns "$$" into "$".
/// Ranks that make a step every 50 ms in the first attempt, and end at once in later ones. Each
/// writes its process ID to the file pidRANK.
std::vector<std::string> steps_in_first_attempt() {
  return shell(
      "echo $$$$ > tmp$RANK; mv tmp$RANK pid$RANK; [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; "
      "exec " +
      kAgentWorker + " steps 100000 50");
}

/// The process ID in the file, once it exists.
pid_t pid_in(const Nodes& nodes, const std::string& file) {
  pid_t pid = 0;
  eventually([&] { return nodes.has(file); });
  std::ifstream(nodes.folder() / file) >> pid;
  return pid;
}

/// The lines of docs/launch.md by which a Python program reports its steps.
std::string documented_snippet() {
  const std::string page = base::read_file(SYNCBN_SOURCE_DIR "/docs/launch.md");
  const std::string begin = "```python\n";
  const size_t first = page.find(begin) + begin.size();
  return page.substr(first, page.find("```", first) - first);
}

/// Waits until `syncbn-launch status` prints something that matches, and returns it.
std::string shown(const std::string& job, const ::testing::Matcher<const std::string&>& matcher) {
  std::string text;
  EXPECT_TRUE(eventually([&] {
    text = run_program({kLauncher, "status", job}).out;
    return ::testing::Value(text, matcher);
  })) << text;
  return text;
}

/// Starts one node in its own folder.
Program& start_alone(Nodes& nodes, int nproc, const Words& options, const Words& program) {
  return nodes.start(0, nproc, Words{"--nnodes=1"} + options + Words{"--master_port=0"}, program);
}

// A phase asks for time to work, which a stopped process does not do.
TEST(LaunchHangTest, AStoppedRankIsNamedInALongPhaseEndedAndStartedAgain) {
  Nodes nodes(1);
  const std::string phase =
      "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; echo $$$$ > tmp$RANK; mv tmp$RANK pid$RANK; "
      "exec " +
      kAgentWorker + " heartbeat 1 phase 600000 checkpoint wait";
  Program& job = start_alone(nodes, 2, {kShortTimeout, "--max_restarts=1"}, shell(phase));
  const pid_t pid = pid_in(nodes, "pid1");
  shown(std::to_string(job.pid()), ContainsRegex("\n    1 .* checkpoint\n"));
  ::kill(pid, SIGSTOP);
  const auto result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(ContainsRegex(fmt::format("rank 1 \\(.*, pid {}\\) holds up the others: no "
                                              "progress for .* s; it is stopped",
                                              pid)),
                    HasSubstr("rank 1 failed: it made no progress (--hang_timeout)"),
                    HasSubstr("restart 1 of 1")));
}

TEST(LaunchNoHangTest, AWaitForTheReaderOfTheOutputIsNoHang) {
  Nodes nodes(1);
  constexpr size_t kBytes = 3'000'000;  // more than the launcher and the pipes hold
  Program& job = start_alone(
      nodes, 1, {kTimeout},
      shell(fmt::format("{0} heartbeat 1; head -c {1} /dev/zero | tr '\\0' x; exec {0} heartbeat 2",
                        kAgentWorker, kBytes)));
  std::this_thread::sleep_for(kMuchLonger);
  const auto result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.size(), kBytes);
}

TEST(LaunchHangTest, TheRankThatHasNotComeToTheCollectiveIsNamedWithItsNumberAndItsThreads) {
  Nodes nodes(1);
  const auto result =
      start_alone(nodes, 3, {kTimeout},
                  shell("touch up$RANK; until [ -e up0 ] && [ -e up1 ] && "
                        "[ -e up2 ]; do sleep 0.01; done; "
                        "if [ $RANK = 1 ]; then exec " +
                        kAgentWorker + " heartbeat 12 waiting 40 broadcast wait; fi; exec " +
                        kAgentWorker + " heartbeat 12 waiting 41 all_reduce wait"))
          .wait();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err,
              AllOf(ContainsRegex("rank 1 \\(.*\\) holds up the others: .*it waits in collective "
                                  "40: rank [02] waits in collective 41 \\(all_reduce\\)"),
                    HasSubstr("threads of rank 1:\n"), Not(HasSubstr("threads of rank 0")),
                    HasSubstr("rank 1 failed")));
}

TEST(LaunchHangTest, OnSeveralNodesTheCulpritsNodeEndsIt) {
  Nodes nodes(2);
  Program& first = nodes.start(0, 2, {kTimeout}, worker("heartbeat 5 waiting 9 all_gather wait"));
  Program& second = nodes.start(1, 1, {kTimeout}, worker("heartbeat 5 wait"));
  const auto with_culprit = second.wait();
  const auto other = first.wait();
  EXPECT_EQ(other.exit_code, 137);
  EXPECT_EQ(with_culprit.exit_code, 137);
  for (const std::string& err : {other.err, with_culprit.err}) {
    EXPECT_THAT(err, ContainsRegex("rank 2 \\(.*\\) holds up the others: .*it has not come to it: "
                                   "rank [01] waits in collective 9 \\(all_gather\\)"));
  }
  EXPECT_THAT(with_culprit.err, HasSubstr("threads of rank 2:\n"));
  EXPECT_THAT(other.err, Not(HasSubstr("threads of rank")));
}

TEST(LaunchHangTest, AStoppedKeeperIsContinued) {
  Nodes nodes(1);
  Program& job = start_alone(nodes, 2, {"--hang_timeout=1000"}, steps_in_first_attempt());
  const pid_t pid = pid_in(nodes, "pid1");
  const pid_t keeper = keeper_of(job.pid());
  ::kill(keeper, SIGSTOP);
  ::kill(pid, SIGSEGV);
  const auto result = job.wait();
  EXPECT_EQ(result.exit_code, 139);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr(fmt::format("the keeper process (pid {}) was stopped", keeper)),
                    HasSubstr("rank 1 failed: killed by signal 11")));
}

TEST(LaunchHangTest, AStoppedSentinelDoesNotKeepTheLauncher) {
  for (const int kills_keeper : {0, 1}) {
    Nodes nodes(1);
    Program& job = start_alone(nodes, 1, {}, worker("wait"));
    const pid_t keeper = keeper_of(job.pid());
    ::kill(children_of(job.pid()).at(0), SIGSTOP);
    kills_keeper != 0 ? ::kill(keeper, SIGKILL) : ::kill(job.pid(), SIGTERM);
    EXPECT_EQ(job.wait().exit_code, kills_keeper != 0 ? 75 : 143);
  }
}

TEST(LaunchHangTest, ADebuggerIsSeen) {
  const pid_t worker = ::fork();
  if (worker == 0) {
    for (;;) ::pause();
  }
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, worker, nullptr, nullptr), 0);
  WorkerState state{.pid = worker};
  launch::look_at_process(state);
  EXPECT_EQ(state.tracer, ::getpid());
  ::kill(worker, SIGKILL);
  ::waitpid(worker, nullptr, __WALL);
}

TEST(LaunchNoHangTest, TimeInWhichTheLauncherDoesNotRunDoesNotCount) {
  Nodes nodes(1);
  Program& job = start_alone(nodes, 2, {"--hang_timeout=6"}, steps_in_first_attempt());
  std::vector<pid_t> all{job.pid(), pid_in(nodes, "pid0"), pid_in(nodes, "pid1")};
  // Once both ranks make steps.
  shown(std::to_string(job.pid()), ContainsRegex("    0 .*ing +[1-9].*    1 .*ing +[1-9]"));
  for (const pid_t pid : all) ::kill(pid, SIGSTOP);
  // When the launcher runs again, answering this reads the records that have arrived meanwhile.
  Program status({kLauncher, "status", std::to_string(job.pid())});
  std::this_thread::sleep_for(kMuchLonger);
  EXPECT_EQ(status.wait().exit_code, 75);
  ::kill(job.pid(), SIGCONT);
  // The workers stay stopped for less than the timeout.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  for (const pid_t pid : all) ::kill(pid, SIGCONT);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // the launcher checks every 0.5 s
  EXPECT_EQ(job.err(), "");
  job.end_by(SIGTERM);
}

WorkerState at(int rank, uint64_t steps, double second, const std::string& place = "202") {
  return {.rank = rank,
          .host = "a",
          .pid = 100 + rank,
          .process = "S",
          .tracer = 0,
          .place = place,
          .reports = true,
          .steps = steps,
          .reported_ns = static_cast<uint64_t>(second * 1e9)};
}

TEST(LaunchHangTest, TheCulpritIsFoundByWhatDistinguishesIt) {
  // A rank is behind if the records are of the same time, or if its record is much older.
  EXPECT_EQ(find_culprit({at(0, 12, 5), at(1, 11, 5.5), at(2, 12, 5)})->rank, 1);
  EXPECT_EQ(find_culprit({at(0, 12, 5), at(1, 12, 5), at(2, 9, 1)})->rank, 2);
  // With one record per second, a lower step in a slightly older record proves nothing.
  EXPECT_FALSE(find_culprit({at(0, 12, 5), at(1, 11, 4.5)}));
  EXPECT_FALSE(find_culprit({at(0, 12, 5), at(1, 12, 5)}));
  EXPECT_FALSE(find_culprit({}));
  // One rank's main thread waits in another place than the others'.
  const auto elsewhere = find_culprit({at(0, 12, 5), at(1, 12, 5, "230"), at(2, 12, 5)});
  EXPECT_EQ(elsewhere->rank, 1);
  EXPECT_FALSE(elsewhere->is_sure);
  EXPECT_FALSE(find_culprit({at(0, 12, 5, "1"), at(1, 12, 5, "2"), at(2, 12, 5, "3")}));
}

/// A state as another launcher gets it.
WorkerState sent(const WorkerState& worker) {
  return nlohmann::json(worker).get<WorkerState>();
}

/// A rank that waits in a collective of `group`.
WorkerState waiting(int rank, const std::string& group, uint64_t sequence) {
  WorkerState one{.rank = rank, .host = "a", .pid = 100 + rank, .process = "S"};
  one.called = {{"default", 4}, {"other", 1}};
  one.called[group] = sequence;
  one.waits = {{.group = group,
                .sequence = sequence,
                .peer = -1,
                .call = fmt::format("barrier #{} of group '{}'", sequence, group),
                .seconds = 31,
                .ranks = {{0, 100, 1}}}};
  return one;
}

TEST(LaunchHangTest, ARankThatHasNotComeToACallIsFoundAmongThoseThatWait) {
  // Rank 1 waits in an earlier call than rank 0 does, for rank 2, which does not wait.
  std::vector<WorkerState> workers{waiting(0, "default", 6), waiting(1, "default", 5),
                                   waiting(2, "default", 4), waiting(3, "other", 2)};
  workers[2].waits.clear();
  workers[3].waits[0].ranks = {{1, 2, 2}};  // ranks 1 and 3: a group without rank 2
  const auto culprit = find_culprit(workers);
  EXPECT_EQ(culprit->rank, 2);
  EXPECT_EQ(culprit->why,
            "has not come to barrier #6 of group 'default', in which rank 0 (and 1 other rank) "
            "waits");
  EXPECT_EQ(find_culprit({sent(workers[0]), sent(workers[2])})->rank, 2);
  // All ranks are in the call: the network is slow.
  EXPECT_FALSE(find_culprit({waiting(0, "default", 5), waiting(1, "default", 5)}));
  // A program without this library reports no calls.
  EXPECT_FALSE(find_culprit({waiting(0, "default", 5), {.rank = 1, .host = "a", .process = "S"}}));
  // It reports no steps either, so it may compute without a time limit.
  EXPECT_FALSE(launch::judge_hang({waiting(0, "default", 5), waiting(1, "default", 5)}, 31, true));
}

TEST(LaunchHangTest, RanksThatWaitForEachOtherAreNamedTogether) {
  const auto culprit =
      find_culprit({waiting(0, "default", 5), waiting(1, "other", 2), waiting(2, "other", 2)});
  EXPECT_EQ(culprit->rank, 0);
  EXPECT_THAT(culprit->why, HasSubstr("rank 0 waits in barrier #5 of group 'default' for rank 1, "
                                      "rank 1 waits in barrier #2 of group 'other' for rank 0"));
}

TEST(LaunchHangTest, TheStatesOfANodeFitIntoAMessage) {
  std::vector<int> members;  // every eighth rank of 16,384, irregularly
  for (int member = 0; member < 16'384; member += 8) {
    if (member * 7919 % 13 >= 6) members.push_back(member);
  }
  std::vector<WorkerState> workers;
  for (int rank = 0; rank < 64; ++rank) {
    WorkerState& one = workers.emplace_back(waiting(rank, "default", 5));
    one.waits.resize(4, one.waits[0]);
    one.waits[0].ranks = launch::rank_runs(members);
  }
  const auto sent_in = [&](size_t max_bytes) {
    const nlohmann::json json = launch::shortened(workers, max_bytes);
    EXPECT_LE(json.dump().size(), std::max<size_t>(max_bytes, 2));
    return json.get<std::vector<WorkerState>>();
  };
  const launch::RankRuns ranks = sent_in(size_t{4} << 20).at(9).waits.at(0).ranks;
  for (int rank = 0; rank < 100; ++rank) {
    EXPECT_EQ(launch::contains(ranks, rank), std::ranges::count(members, rank) > 0);
  }
  EXPECT_EQ(sent_in(size_t{100} << 10).size(), 64);
  EXPECT_TRUE(sent_in(size_t{100} << 10).at(9).waits.empty());
  EXPECT_GT(sent_in(5000).size(), 5);
  EXPECT_EQ(sent_in(0).size(), 0);
}

TEST(LaunchHangTest, ANodeThatClaimsHugeGroupsUsesNoMemory) {
  nlohmann::json state = waiting(0, "default", 5);
  state["waits"][0]["ranks"] = {{0, 1'000'000, 0}, {2, INT_MAX, INT_MAX}, {-9, 1, 1}};
  const launch::RankRuns ranks = state.get<WorkerState>().waits.at(0).ranks;
  EXPECT_EQ(ranks.size(), 3);
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(launch::contains(ranks, rank), rank % 2 == 0);
}

TEST(LaunchStragglerTest, ARankThatTheOthersWaitForInThreeIntervalsIsNamedOnce) {
  launch::StragglerWatch watch{std::chrono::seconds(30)};
  std::vector<WorkerState> workers(4);
  std::vector<std::string> lines;
  const auto interval = [&](const std::vector<double>& own, uint64_t calls) {
    for (size_t rank = 0; rank < workers.size(); ++rank) {
      workers[rank].rank = static_cast<int>(rank);
      workers[rank].host = "a";
      workers[rank].calls += calls;
      workers[rank].own_seconds += own[rank];
    }
    lines = watch.add(workers);
  };
  interval({50, 1, 1, 1}, 100);  // before the first interval
  for (int i = 0; i < 2; ++i) interval({10, 10, 14, 10.5}, 100);
  EXPECT_TRUE(lines.empty());
  interval({10, 10, 12, 10}, 100);  // fast enough
  interval({10, 10, 14, 10}, 100);
  interval({10, 10, 14, 10}, 100);
  EXPECT_TRUE(lines.empty());
  interval({10, 10, 14, 10}, 100);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_EQ(lines[0],
            "rank 2 (a, pid 0) is slow, and the others wait for it: it spends 14.0 s between "
            "collectives, and the median of the ranks 10.0 s");
  for (int i = 0; i < 5; ++i) {
    interval({10, 10, 14, 10}, 100);
    EXPECT_TRUE(lines.empty());
  }
  for (int i = 0; i < 5; ++i) interval({20, 10, 10, 10}, 2);  // saves, and makes no steps
  EXPECT_TRUE(lines.empty());
  // Calls take nearly all of the time, and some of them overlap on the GPU.
  for (int i = 0; i < 5; ++i) interval({0.5, -3, -2, -3}, 100);
  EXPECT_TRUE(lines.empty());
  workers[3].gpu = "0000:dc:00.0";
  for (int i = 0; i < 3; ++i) interval({-1, -3, 0, 9}, 100);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_THAT(lines[0], HasSubstr("rank 3 (a, GPU 0000:dc:00.0, pid 0) is slow"));
}

TEST(LaunchHangTest, OnlyADebuggerStopsTheTime) {
  std::vector<WorkerState> workers{at(0, 12, 5), at(1, 9, 9)};
  EXPECT_FALSE(launch::judge_hang(workers, 31, true));  // rank 1 makes progress
  for (WorkerState& worker : workers) worker.idle_seconds = 31;
  workers[1].gpu = "0000:dc:00.0";
  for (const bool ends : {false, true}) {
    const auto behind = launch::judge_hang(workers, 31, ends);
    EXPECT_EQ(behind->rank, ends ? 1 : -1);
    EXPECT_FALSE(behind->stops_time);
    EXPECT_THAT(behind->text, HasSubstr("rank 1 (a, GPU 0000:dc:00.0, pid 101) holds up"));
  }
  workers[0].tracer = 77;
  EXPECT_FALSE(launch::judge_hang(workers, 31, false));
  EXPECT_TRUE(launch::judge_hang(workers, 31, true)->stops_time);
  const nlohmann::json hang = *launch::judge_hang(workers, 31, true);
  EXPECT_TRUE(hang.get<launch::Hang>().stops_time);
}

TEST(LaunchHangTest, ARankThatHasAskedForTimeHoldsUpNobody) {
  std::vector<WorkerState> workers{waiting(0, "default", 5), waiting(1, "default", 4)};
  workers[1].waits.clear();
  EXPECT_EQ(launch::judge_hang(workers, 31, true)->rank, 1);
  workers[1].allowed_seconds = 0.5;
  EXPECT_FALSE(launch::judge_hang({sent(workers[0]), sent(workers[1])}, 31, true));
  workers[1].process = "T";
  EXPECT_EQ(launch::judge_hang(workers, 31, true)->rank, 1);
}

TEST(LaunchHangTest, AWorkerThatIsAloneHoldsUpNobody) {
  std::vector<WorkerState> workers{at(0, 12, 5), at(1, 12, 5)};
  workers[0].process = "?";  // has ended, so it has been idle for longer
  workers[0].idle_seconds = 100;
  workers[1].gpu = "0000:dc:00.0";
  EXPECT_FALSE(launch::judge_hang(workers, 31, false));
  const auto hang = launch::judge_hang(workers, 31, true);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_EQ(hang->text,
            "rank 1 (a, GPU 0000:dc:00.0, pid 101) is the only worker that still runs, and makes "
            "no progress for 31.0 s");
}

// A process with many threads has more stacks than are printed, and reading them may time out.
TEST(LaunchHangReportTest, StacksThatAreCutAreShown) {
  const TempFolder folder;
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", (folder.path().string() + ":" + path).c_str(), 1);
  for (const std::string rest : {"yes", "exec sleep 1000", "exec >&-; exec sleep 1000"}) {
    folder.write("eu-stack", "#!/bin/sh\necho first\n" + rest + "\n");
    std::filesystem::permissions(folder.path() / "eu-stack", std::filesystem::perms(0700));
    const std::string text =
        launch::describe_threads(::getpid(), launch::Clock::now() + std::chrono::seconds(4));
    EXPECT_EQ(text.starts_with("first\n"), rest.find(">&-") == rest.npos) << rest << text;
    EXPECT_LE(text.size(), size_t{32} << 10);
  }
  ::setenv("PATH", path.c_str(), 1);
}

/// Whether the debugger is installed and may attach to other processes.
bool has_debugger(const std::string& program) {
  std::string scope;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  return run_program({"sh", "-c", "command -v " + program}).exit_code == 0 &&
         (::geteuid() == 0 || scope.empty() || scope == "0");
}

/// Runs the program, and expects `function` in the stacks of its threads.
void expect_function(const std::string& function, const std::vector<std::string>& argv) {
  Program program(argv);
  std::string text;
  EXPECT_TRUE(eventually([&] {
    text =
        launch::describe_threads(program.pid(), launch::Clock::now() + std::chrono::seconds(100));
    return text.find(function) != std::string::npos;
  })) << text;
  program.end_by(SIGTERM);
}

TEST(LaunchHangReportTest, ADebuggerShowsTheFunctionInWhichAWorkerIs) {
  SYNCBN_SKIP_UNLESS(has_debugger("gdb") || has_debugger("eu-stack"), "debugger");
  expect_function("wait_for_signal", {kAgentWorker, "wait"});
}

TEST(LaunchHangReportTest, PySpyShowsTheLineInWhichAPythonWorkerIs) {
  SYNCBN_SKIP_UNLESS(has_debugger("py-spy"), "py-spy");
  expect_function("waits_for_ever (<string>:3)",
                  {"python3", "-c",
                   "import time\ndef waits_for_ever():\n    time.sleep(10000)\nwaits_for_ever()"});
}

TEST(LaunchHangReportTest, PythonWithFaulthandlerShowsItsLines) {
  Nodes nodes(1);
  nodes.folder().write("worker.py", documented_snippet() +
                                        "import faulthandler\n"
                                        "faulthandler.enable()\n"
                                        "def waits_for_ever():\n"
                                        "    heartbeat(1)\n"
                                        "    time.sleep(100000)\n"
                                        "waits_for_ever()\n");
  const auto result = start_alone(nodes, 1, {kShortTimeout}, {"worker.py"}).wait();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err, AllOf(HasSubstr("Fatal Python error: Aborted"),
                                ContainsRegex("worker.py\", line [0-9]+ in waits_for_ever"),
                                HasSubstr("it made no progress (--hang_timeout) and was killed")));
}

/// A job name that no other test on this machine uses.
std::string own(const std::string& name) {
  return fmt::format("{}-{}", name, ::getpid());
}

TEST(LaunchStatusTest, ShowsEveryRankOnAllNodes) {
  Nodes nodes(2);
  const std::string id = "--rdzv_id=" + own("shown");
  Program& first = nodes.start(0, 2, {id}, worker("heartbeat 31 phase 0 evaluation wait"));
  nodes.start(1, 1, {id}, worker("heartbeat 32 waiting 8 all_reduce wait"));
  const std::string text =
      shown(own("shown"),
            AllOf(HasSubstr("job " + own("shown") + " ("),
                  HasSubstr("attempt 0, 2 nodes: runs\nprogram: "),
                  HasSubstr("heartbeat 31 phase 0 evaluation wait"),
                  ContainsRegex("    0 .* sleeping +31 .* evaluation\n"),
                  ContainsRegex("    1 .* sleeping +31 .* evaluation\n"),
                  ContainsRegex("    2 .* sleeping +32 .* waits in collective 8: all_reduce\n")));
  // Both launchers run here and belong to one job.
  EXPECT_EQ(text.find("job shown"), text.rfind("job shown"));
  EXPECT_THAT(run_program({kLauncher, "status", std::to_string(first.pid())}).out,
              HasSubstr("job shown"));
  first.send_signal(SIGTERM);
  nodes.wait();
}

TEST(LaunchStatusTest, TheDocumentationsSnippetReportsSteps) {
  Nodes nodes(1);
  nodes.folder().write("snippet.py", documented_snippet() + "heartbeat(17)\ntime.sleep(1000)\n");
  Program& job =
      start_alone(nodes, 1, {"--rdzv_id=" + own("snippet")}, {"snippet.py", "--api_key=a-secret"});
  EXPECT_THAT(shown(own("snippet"), HasSubstr(" 17 ")), HasSubstr("--api_key=***")) << job.err();
  job.end_by(SIGTERM);
}

TEST(LaunchStatusTest, IsExplainedByItsHelp) {
  for (const char* command : {"status", "explain"}) {
    const auto help = run_program({kLauncher, command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_THAT(help.out, ::testing::StartsWith(std::string("usage: syncbn-launch ") + command));
  }
}

TEST(LaunchStatusTest, ExplainRefusesWhatIsNoFile) {
  for (const char* path : {"/", "/dev/zero"}) {
    const auto result = run_program({kLauncher, "explain", path});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, HasSubstr(std::string(path) + " is no file"));
  }
}

TEST(LaunchStatusTest, NeitherAStoppedLauncherNorAFalseOneHidesTheOthers) {
  Nodes stopped_nodes(1);
  Nodes nodes(1);
  Program& stopped = start_alone(stopped_nodes, 1, {"--rdzv_id=" + own("stopped")}, worker("wait"));
  Program& job = start_alone(nodes, 1, {"--rdzv_id=" + own("others")}, worker("wait"));
  const auto answers = [](const char* name) {
    return run_program({kLauncher, "status", own(name)}).exit_code == 0;
  };
  ASSERT_TRUE(eventually([&] { return answers("stopped") && answers("others"); }));
  ::kill(stopped.pid(), SIGSTOP);
  const base::UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  const auto size = launch::socket_address(launch::StatusServer::kStatus, ::getpid(), address);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  std::thread false_launcher([&listener] {
    const base::UniqueFd one(::accept(listener.get(), nullptr, nullptr));
    const std::string text =
        fmt::format(R"({{"run_id": 3, "job_id": "{}", "workers": 7}})", own("others"));
    ::send(one.get(), text.data(), text.size(), MSG_NOSIGNAL);
  });
  const auto result = run_program({kLauncher, "status"});
  false_launcher.join();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.out, HasSubstr("job " + own("others") + " ("));
  EXPECT_THAT(result.err, HasSubstr(fmt::format("launcher {0} does not answer (stopped? kill "
                                                "-CONT {0})",
                                                stopped.pid())));
  // The stopped launcher's job may be the one that is asked for.
  const auto unknown = run_program({kLauncher, "status", "no-such-job"});
  EXPECT_EQ(unknown.exit_code, 75);
  EXPECT_THAT(unknown.err,
              AllOf(HasSubstr("that answered has PID or job 'no-such-job'; running: "),
                    HasSubstr(fmt::format("job {} (launcher {})", own("others"), job.pid())),
                    HasSubstr(fmt::format("launcher {} does not answer", stopped.pid()))));
  for (Program* one : {&stopped, &job}) {
    ::kill(one->pid(), SIGCONT);
    one->end_by(SIGTERM);
  }
}

}  // namespace
}  // namespace syncbn::test

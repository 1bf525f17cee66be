// Nodes that one command starts over ssh, with a real sshd on two loopback addresses.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <pwd.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "launch/launcher.h"
#include "launch/leftovers.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/ssh_server.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

constexpr const char* kFirst = "127.0.0.1";
constexpr const char* kSecond = "127.0.0.2";

class SshTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(server_.available(), "sshd");
    fs::create_directory(folder_ / "tmp");
  }
  void TearDown() override {
    for (const pid_t pid : job()) ::kill(pid, SIGKILL);
  }

  /// All processes of the job, including launchers and keepers: on other hosts, too, they run in
  /// the head's folder.
  std::vector<pid_t> job() const { return processes_in(folder_.path()); }

  /// The options for the test's sshd, and then these words.
  Words over_ssh(const Words& words) const {
    return Words{"--export=TMPDIR", fmt::format("--ssh_port={}", server_.port()),
                 "--ssh_identity=" + server_.identity(), "--ssh_options=" + server_.options()} +
           words;
  }
  /// The same, with two workers on the first host and one on the second.
  Words on_two(const Words& words) const {
    return over_ssh(Words{fmt::format("--hosts={}:2,{}:1", first_, second_)} + words);
  }

  RunProgramOptions run_options(std::map<std::string, std::string> env = {}) const {
    env.insert({{"OMP_NUM_THREADS", "1"}, {"TMPDIR", folder_ / "tmp"}});
    return {.env = std::move(env), .cwd = folder_.path()};
  }
  ProgramResult run(const std::vector<std::string>& words,
                    std::map<std::string, std::string> env = {}) const {
    return run_program(launch_command(words), run_options(std::move(env)));
  }
  std::unique_ptr<Program> start(const std::vector<std::string>& words) const {
    return std::make_unique<Program>(launch_command(words), run_options());
  }

  /// Three workers with two processes each, which end only by SIGKILL.
  std::unique_ptr<Program> start_stubborn(const std::vector<std::string>& options,
                                          bool directly = false) const {
    folder_.write("stubborn",
                  "#!/bin/sh\ntrap '' TERM INT HUP\nsetsid sleep 1000 &\nexec sleep 1000\n", true);
    std::vector<std::string> words = options;
    words.push_back(folder_ / "stubborn");
    if (directly) words.insert(words.begin(), "--hosts=127.0.0.1:2,127.0.0.2:1");
    auto program = start(directly ? words : on_two(words));
    EXPECT_TRUE(program->wait_until([this] { return sleepers() == 6; }));
    return program;
  }
  size_t sleepers() const {
    size_t count = 0;
    for (const pid_t pid : job()) {
      if (name_of(pid) == "sleep") ++count;
    }
    return count;
  }
  /// The launcher on another host: there, a child of sshd.
  std::optional<pid_t> launcher_on(const std::string& host) const {
    const auto launchers = processes_that([&](const fs::path& process) {
      const auto holds = [&](const char* file, const std::string& text) {
        std::ifstream stream(process / file);
        const std::string bytes(std::istreambuf_iterator<char>(stream), {});
        return bytes.find(text) != std::string::npos;
      };
      std::error_code error;
      return fs::read_symlink(process / "cwd", error) == folder_.path() &&
             holds("comm", "syncbn-launch") && holds("environ", fmt::format(" {} ", host));
    });
    if (launchers.size() != 1) return std::nullopt;
    return launchers[0];
  }
  static std::string name_of(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/comm", pid));
    std::string name;
    file >> name;
    return name;
  }

  void expect_nothing_left() const {
    EXPECT_TRUE(eventually([this] { return job().empty(); }, kPromptly));
    EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
  }

  // With the user, because the head starts a host without one directly on this machine.
  const std::string user_ = ::getpwuid(::geteuid())->pw_name;
  const std::string first_ = user_ + "@" + kFirst;
  const std::string second_ = user_ + "@" + kSecond;
  const std::string both_ = first_ + ", " + second_;  // in messages
  const std::string hosts_ = "--hosts=" + first_ + "," + second_;
  SshServer server_;
  TempFolder folder_;
};

// ctest runs each suite as one entry; these aliases split the file so that they run in parallel.
using SshFaultTest = SshTest;
using SshSignalTest = SshTest;

TEST_F(SshTest, StartsTheNodesOfOneJobInTheFolderOfTheHead) {
  const auto result = run(
      on_two({"sh", "-c",
              "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK; "
              "pwd > folder$RANK; echo problem >&2; echo $SSH_CONNECTION > connection$RANK"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line : {"[0] rank 0 of 3, 0 of 2, node 0\n", "[1] rank 1 of 3, 1 of 2, node 0\n",
                           "[2] rank 2 of 3, 0 of 1, node 1\n"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  for (const char* line : {"[0] problem\n", "[1] problem\n", "[2] problem\n"}) {
    EXPECT_THAT(result.err, HasSubstr(line));
  }
  EXPECT_EQ(count(result.out + result.err, "\n"), 6);
  EXPECT_EQ(base::read_file(folder_ / "folder2"), folder_.path().string() + "\n");
  // The connections were made by ssh, to each of the addresses.
  EXPECT_THAT(base::read_file(folder_ / "connection0"), HasSubstr(std::string(kFirst) + " "));
  EXPECT_THAT(base::read_file(folder_ / "connection2"), HasSubstr(std::string(kSecond) + " "));
  expect_nothing_left();
}

TEST_F(SshTest, ArgumentsAndValuesArriveAsTheyWere) {
  const std::vector<std::string> hostile{"a b",   "it's",     "\"quoted\"", "$(touch pwned)",
                                         "`id`",  "",         "two\nlines", "back\\slash",
                                         "\xff*", "; exit 9", "~",          "-x"};
  const Words words =
      on_two({"sh", "-c", "printf '%s\\0' \"$@\" \"$SYNCBN_TEST_VALUE\" > args$RANK", "sh"});
  const std::string value = "'$(touch pwned)\n\" \xfe";
  const auto result = run(words + hostile, {{"SYNCBN_TEST_VALUE", value}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::string expected;
  for (const std::string& word : hostile) expected += word + '\0';
  expected += value + '\0';
  for (const char* file : {"args0", "args1", "args2"}) {
    EXPECT_EQ(base::read_file(folder_ / file), expected);
  }
  EXPECT_FALSE(fs::exists(folder_ / "pwned"));
}

TEST_F(SshTest, TheFirstFailingWorkersCodeIsTheHeads) {
  for (const auto& [rank, code] : {std::pair{2, 7}, {2, 255}, {0, 5}}) {
    const auto result =
        run(on_two({"--report=report.json", "sh", "-c",
                    fmt::format("[ $RANK = {} ] && exit {}; sleep 1000", rank, code)}));
    EXPECT_EQ(result.exit_code, code);
    const auto line = fmt::format("syncbn-launch: rank {} failed: exit code {}\n", rank, code);
    EXPECT_EQ(count(result.err, line), 1) << result.err;
    // For another node's failure, the first node prints once why all end.
    const int elsewhere = rank == 2 ? 1 : 0;
    EXPECT_EQ(count(result.err, "failed"), 1 + elsewhere) << result.err;
    EXPECT_EQ(count(result.err, "ending the workers of all nodes"), elsewhere) << result.err;
    const auto report = nlohmann::json::parse(base::read_file(folder_ / "report.json"));
    EXPECT_EQ(report["exit_code"], code);
    EXPECT_EQ(report["failure"]["rank"], rank);
    expect_nothing_left();
  }
}

TEST_F(SshTest, OfFailuresAtTheSameTimeTheReportHoldsTheOneOfTheExitCode) {
  const auto head =
      start({"--hosts=127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", "--report=report.json", "sh", "-c",
             "echo up; while [ ! -e go$RANK ]; do sleep 0.01; done; exit $((6 + RANK))"});
  ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "up\n") == 3; }));
  const pid_t keeper = keeper_of(head->pid());
  const auto launchers = children_of(keeper);
  ASSERT_EQ(launchers.size(), 3U);
  // The first node's launcher gets both failures at once.
  ASSERT_EQ(::kill(launchers[0], SIGSTOP), 0);
  for (int rank = 1; rank < 3; ++rank) {
    folder_.write(fmt::format("go{}", rank), "");
    const std::string report = fmt::format("rank {} failed: exit code {}\n", rank, 6 + rank);
    ASSERT_TRUE(head->wait_for_err(report));
  }
  ASSERT_EQ(::kill(launchers[0], SIGCONT), 0);
  const int code = head->wait().exit_code;
  EXPECT_THAT(code, AnyOf(7, 8));
  const auto report = nlohmann::json::parse(base::read_file(folder_ / "report.json"));
  EXPECT_EQ(report["exit_code"], code);
  EXPECT_EQ(report["failure"]["exit_code"], code);
}

TEST_F(SshTest, RestartsOnAllHosts) {
  const auto result =
      run(on_two({"--max_restarts=1", "sh", "-c",
                  "echo attempt $TORCHELASTIC_RESTART_COUNT; "
                  "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK != 2 ] || exit 3; "
                  "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 1000"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "attempt 1\n"), 3);
  EXPECT_EQ(count(result.err, "restart 1 of 1"), 1);
}

TEST_F(SshTest, TheHeadMakesAToken) {
  const auto result =
      run(on_two({"bash", "-c",
                  "[ $RANK = 0 ] || exit 0; exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT; "
                  "echo syncbn-agent 6 >&3; grep -m1 token <&3"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("it has no token, and this job needs one"));
}

TEST_F(SshTest, NothingStartsUnlessAllHostsAreReady) {
  const auto expect_nothing_started = [&](const Words& options, int code, const auto& message,
                                          const Words& program = {"touch", "trace"}) {
    const auto result = run(over_ssh(options + program), {{"CUDA_VISIBLE_DEVICES", "0"}});
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_THAT(result.err, AllOf(message, HasSubstr("nothing has been started")));
    EXPECT_FALSE(fs::exists(folder_ / "trace"));
    expect_nothing_left();
  };
  // No sshd listens there.
  expect_nothing_started({hosts_ + "," + user_ + "@127.0.0.3"}, 75,
                         AllOf(HasSubstr("error: " + user_ + "@127.0.0.3: "),
                               HasSubstr("Connection refused"), Not(HasSubstr("127.0.0.1: "))));
  expect_nothing_started({"--hosts=127.0.0.1,no-such-host.invalid"}, 75,
                         AllOf(HasSubstr("error: no-such-host.invalid: "), HasSubstr("resolve")));
  expect_nothing_started(
      {"--hosts=127.0.0.1,nobody@127.0.0.2"}, 75,
      AllOf(HasSubstr("error: nobody@127.0.0.2: "), HasSubstr("Permission denied")));
  // Equal messages of several hosts are printed once.
  expect_nothing_started(
      {hosts_, "--ssh_launcher=/nowhere/syncbn-launch"}, 127,
      AllOf(HasSubstr("error: " + both_ + ": there is no /nowhere/syncbn-launch"),
            HasSubstr("--ssh_launcher")));
  expect_nothing_started({hosts_, "--redirects=9"}, 2,
                         HasSubstr(both_ + ": --redirects=9: expected"));
  const auto on_both = [this](const char* what) {
    return HasSubstr("error: " + both_ + ": " + what);
  };
  expect_nothing_started({hosts_, "--log_dir=/proc/x", "--redirects=3"}, 2,
                         on_both("cannot make the log folder /proc/x"));
  expect_nothing_started({hosts_, "--event_log_handler=json:/proc/x/y"}, 2,
                         on_both("cannot open the event log /proc/x/y"));
  expect_nothing_started({hosts_, "--bind=cores", "--nproc_per_node=4096"}, 2,
                         on_both("--bind=cores: 4096 workers"));
  expect_nothing_started({hosts_, "--master_addr=no-such-host.invalid"}, 2,
                         AllOf(HasSubstr("error: " + second_ + ": the name of node 0"),
                               HasSubstr("no-such-host.invalid")));
  expect_nothing_started(
      {hosts_, "--export=CUDA_VISIBLE_DEVICES", "--virtual_local_rank", "--nproc_per_node=2"}, 2,
      on_both("--virtual_local_rank: 2 workers"));
  expect_nothing_started({hosts_}, 127,
                         on_both("program not found: there is no file /nowhere/program"),
                         {"/nowhere/program"});
  expect_nothing_started({hosts_, "--ssh_command=sh -c 'exec sleep 1000'", "--ssh_timeout=0.3"}, 75,
                         on_both("no answer within 300 ms"));
  // A wrapper for ssh that spoils the command for the second host.
  const auto wrapper = folder_.write("wrapper",
                                     "#!/bin/sh\n"
                                     "case \" $* \" in *'@127.0.0.2 '*) exec ssh "
                                     "\"$@\" -bad-;; esac; exec ssh \"$@\"\n",
                                     true);
  expect_nothing_started(
      {hosts_, "--ssh_command=" + wrapper}, 2,
      AllOf(HasSubstr("error: " + second_ + ": its launcher ended with exit code 2"),
            Not(HasSubstr("127.0.0.1"))));
}

TEST_F(SshTest, EachHostSaysWhereItsLogsAre) {
  const auto result = run(on_two({"--log_dir=" + (folder_ / "logs").string(), "true"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const std::string host : {kFirst, kSecond}) {
    EXPECT_EQ(count(result.err, "log files on " + host + " are in " + (folder_ / "logs").string()),
              1)
        << result.err;
  }
  // One folder for each host, and no other one.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "logs"), {}), 2);
}

TEST_F(SshSignalTest, SaysWhichHostsItWaitsFor) {
  const auto head = start(on_two({"--ssh_command=sh -c 'exec sleep 1000'", "true"}));
  EXPECT_TRUE(head->wait_for_err("waiting for an answer of " + both_ + "\n"));
}

TEST_F(SshFaultTest, NothingOutlivesAHeadThatIsKilled) {
  for (const bool directly : {false, true}) {
    start_stubborn({}, directly)->end_by(SIGKILL);
    expect_nothing_left();
  }
}

TEST_F(SshFaultTest, NothingOutlivesTheKeeperOfTheConnections) {
  const auto head = start_stubborn({});
  const pid_t keeper = keeper_of(head->pid());
  ASSERT_EQ(::kill(keeper, SIGKILL), 0);
  const auto result = head->wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("the keeper process"));
  expect_nothing_left();
}

TEST_F(SshFaultTest, ALostConnectionEndsTheJobEverywhere) {
  const auto head = start_stubborn({"--shutdown_timeout=0.2"});
  const pid_t keeper = keeper_of(head->pid());
  const auto connections = children_of(keeper);
  ASSERT_EQ(connections.size(), 2U);
  ASSERT_EQ(::kill(connections[1], SIGKILL), 0);
  const auto result = head->wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("the connection to " + second_ + " is gone"));
  expect_nothing_left();
}

TEST_F(SshFaultTest, ALauncherThatIsStoppedDoesNotHoldUpTheHead) {
  std::array<std::unique_ptr<Program>, 2> heads;
  for (const size_t stopped : {0, 1}) {
    auto& head = heads[stopped] =
        start({"--hosts=127.0.0.1:1,127.0.0.2:1", "--shutdown_timeout=0.2",
               "--rdzv_conf=keep_alive_interval=2", "sh", "-c", "echo up; exec sleep 1000"});
    ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "up\n") == 2; }));
    const auto launchers = children_of(keeper_of(head->pid()));
    ASSERT_EQ(launchers.size(), 2U);
    ASSERT_EQ(::kill(launchers[stopped], SIGSTOP), 0);
  }
  for (const size_t stopped : {0, 1}) {
    const auto result = heads[stopped]->wait();
    EXPECT_EQ(result.exit_code, 75) << result.err;
    const std::string host = stopped == 0 ? kFirst : kSecond;
    EXPECT_THAT(result.err,
                HasSubstr("error: " + host + " does not answer; what runs there is killed\n"));
  }
  expect_nothing_left();
}

TEST_F(SshFaultTest, OneThatIsStoppedOnAnotherHostIsNamedAfterASignal) {
  const auto head = start(on_two({"--shutdown_timeout=0.2", "--rdzv_conf=keep_alive_interval=2",
                                  "sh", "-c", "echo up; exec sleep 1000"}));
  ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "up\n") == 3; }));
  const auto launcher = launcher_on(kSecond);
  ASSERT_TRUE(launcher);
  ASSERT_EQ(::kill(*launcher, SIGSTOP), 0);
  const auto result = head->end_by(SIGTERM);
  EXPECT_THAT(result.err,
              HasSubstr("error: " + second_ + " does not answer; what runs there may still run\n"));
  EXPECT_EQ(state_of(*launcher), 'T');
  ASSERT_EQ(::kill(*launcher, SIGCONT), 0);
  expect_nothing_left();
}

TEST_F(SshFaultTest, AServerThatIsKilledEndsTheJobEverywhere) {
  const auto head = start_stubborn({"--shutdown_timeout=0.2"});
  for (const pid_t pid : job()) {
    std::ifstream stat(fmt::format("/proc/{}/stat", pid));
    std::string skipped;
    pid_t parent = 0;
    stat >> skipped >> skipped >> skipped >> parent;
    if (name_of(pid) != "syncbn-launch" || name_of(parent) != "sshd") continue;
    ASSERT_EQ(::kill(parent, SIGKILL), 0);
    break;  // one is enough
  }
  const auto result = head->wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("the connection to " + user_ + "@127.0.0."));
  expect_nothing_left();
}

TEST_F(SshSignalTest, ASignalToTheHeadReachesAllWorkers) {
  for (const auto& [signal, name] :
       std::vector<std::pair<int, std::string>>{{SIGINT, "INT"}, {SIGTERM, "TERM"}}) {
    const auto head = start(on_two({"sh", "-c",
                                    "trap 'echo got INT; exit 0' INT; "
                                    "trap 'echo got TERM; exit 0' TERM; trap 'echo got USR1' USR1; "
                                    "echo ready; while true; do sleep 0.01; done"}));
    ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "ready") == 3; }));
    head->send_signal(SIGUSR1);
    ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "got USR1") == 3; }));
    const auto result = head->end_by(signal);
    // Another node may already know that the job ends, and then ends its workers by SIGTERM.
    const int by_other = signal == SIGTERM ? 0 : count(result.out, "got TERM");
    EXPECT_EQ(count(result.out, "got " + name) + by_other, 3) << result.out;
    EXPECT_GE(count(result.out, "got " + name), 1) << result.out;
    EXPECT_THAT(result.err, Not(HasSubstr("error")));
    expect_nothing_left();
  }
}

TEST_F(SshSignalTest, ASecondInterruptKillsAtOnce) {
  const auto head = start_stubborn({"--shutdown_timeout=1000"});
  head->send_signal(SIGINT);
  head->send_signal(SIGTERM);
  EXPECT_THAT(head->wait().exit_code, AnyOf(130, 143));
  expect_nothing_left();
}

TEST_F(SshSignalTest, ASignalWhileHostsAreAskedEndsIt) {
  const auto head = start(on_two({"--ssh_command=sh -c 'exec sleep 1000'", "true"}));
  ASSERT_TRUE(head->wait_until([&] { return sleepers() == 2; }));
  head->end_by(SIGINT);
  expect_nothing_left();
}

TEST_F(SshSignalTest, StopsAndContinuesTheWorkersWithItself) {
  const auto head = start(on_two({"sh", "-c", "echo $$$$; while true; do :; done"}));
  ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "\n") == 3; }));
  std::vector<pid_t> workers;
  std::istringstream lines(head->out());
  for (std::string line; std::getline(lines, line);) {
    workers.push_back(std::atoi(line.substr(line.find(' ')).c_str()));
  }
  const auto all_are = [&](bool stopped) {
    return (state_of(head->pid()) == 'T') == stopped &&
           std::all_of(workers.begin(), workers.end(),
                       [&](pid_t pid) { return (state_of(pid) == 'T') == stopped; });
  };
  head->send_signal(SIGTSTP);
  ASSERT_TRUE(head->wait_until([&] { return all_are(true); }));
  head->send_signal(SIGCONT);
  ASSERT_TRUE(head->wait_until([&] { return all_are(false); }));
  head->end_by(SIGTERM);
}

// The launchers on the hosts are not stopped.
TEST_F(SshSignalTest, ControlZIsNoHang) {
  const auto head = start(on_two(
      {"--hang_timeout=6", "sh", "-c", "echo up; exec " + kAgentWorker + " steps 100000 100"}));
  ASSERT_TRUE(head->wait_until([&] { return count(head->out(), "\n") == 3; }));
  std::this_thread::sleep_for(std::chrono::seconds(1));  // until each has made a step
  head->send_signal(SIGTSTP);
  ASSERT_TRUE(head->wait_until([&] { return state_of(head->pid()) == 'T'; }));
  std::this_thread::sleep_for(std::chrono::seconds(8));  // longer than the timeout
  head->send_signal(SIGCONT);
  ASSERT_TRUE(head->wait_until([&] { return state_of(head->pid()) != 'T'; }));
  const auto result = head->end_by(SIGTERM);
  EXPECT_THAT(result.err, Not(HasSubstr("progress")));
}

TEST_F(SshTest, LinesOfDifferentHostsDoNotMix) {
  const auto result = run(on_two({"seq", "20000"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::map<std::string, int> next;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' ');
    EXPECT_EQ(line.substr(space), fmt::format(" {}", ++next[line.substr(0, space)]));
  }
  EXPECT_THAT(next, ElementsAre(std::pair<const std::string, int>("[0]", 20000),
                                std::pair<const std::string, int>("[1]", 20000),
                                std::pair<const std::string, int>("[2]", 20000)));
}

TEST_F(SshTest, ThisMachineNeedsNoSsh) {
  const std::vector<std::string> options{"--hosts=localhost:2", "--ssh_command=false"};
  auto result = run(options + Words{"sh", "-c", "echo $RANK of $WORLD_SIZE; cat"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "of 2\n"), 2);
  result = run(options + Words{"sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 1000"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(count(result.err, "failed"), 1) << result.err;
}

// The report of a worker with a long command is longer than any line of output may be.
TEST_F(SshTest, ALongReportArrives) {
  const std::string argument(100'000, '\'');
  const std::string script = "echo '{\"message\": \"too bad\"}' > $TORCHELASTIC_ERROR_FILE; exit 7";
  std::vector<std::string> words{
      "--hosts=localhost:1", "--report=report.json", "sh", "-c", script, "sh"};
  words.insert(words.end(), 15, argument);
  const auto result = run(words);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(result.err, AllOf(Not(HasSubstr("is gone")), Not(HasSubstr("\"exit_code\""))));
  const auto report = nlohmann::json::parse(base::read_file(folder_ / "report.json"));
  EXPECT_EQ(report["exit_code"], 7);
  EXPECT_EQ(report["failure"]["command"].back(), argument);
  EXPECT_THAT(report["failure"]["error_message"], HasSubstr("too bad"));
}

TEST_F(SshTest, ADryRunPrintsAndStartsNothing) {
  const auto result = run(on_two({"--dry_run", "--ssh_command=no-ssh-at-all", "touch", "a b"}),
                          {{"AWS_SECRET", "no"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("# node 0, on " + first_ + ": no-ssh-at-all "),
                                HasSubstr("# node 1, on " + second_ + ": no-ssh-at-all "),
                                HasSubstr("--nproc_per_node=2 --nnodes=2 --node_rank=0"),
                                HasSubstr("--nproc_per_node=1 --nnodes=2 --node_rank=1"),
                                HasSubstr("-- touch 'a b'\n"), HasSubstr("OMP_NUM_THREADS=1"),
                                Not(HasSubstr("AWS_SECRET"))));
  EXPECT_FALSE(fs::exists(folder_ / "a b"));
}

TEST_F(SshTest, PythonWorkersOfTwoHostsAddUp) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  folder_.write("sum.py", kSumOfRanks);
  const auto result = run(on_two({"sum.py"}), {{"PYTHON_EXEC", python()}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "sum 3\n"), 3) << result.err;
}

/// Runs the launcher of a node whose head sends these lines.
ProgramResult node_told(const std::string& lines) {
  const TempFolder folder;
  const auto file = folder.write("head", lines + "\n");
  return run_program({"sh", "-c", fmt::format("cat {} | {} --from_head", file, kLauncher)});
}

TEST(SshNodeTest, NamesAHeadOfAnotherVersion) {
  EXPECT_THAT(node_told(R"({"type":"job","version":"0.0.1-other","mark":"MARK"})").err,
              AllOf(HasSubstr("MARK{"), HasSubstr("\"exit_code\":2"), HasSubstr("0.0.1-other")));
}

TEST(SshNodeTest, AFileThatIsNoHeadEndsItWithoutABug) {
  for (const std::string line :
       {"hello", R"({"type":"job"})", R"({"type":"job","version":1,"mark":"MARK"})"}) {
    const auto result = node_told(line);
    EXPECT_EQ(result.exit_code, 75) << line;
    EXPECT_THAT(result.err, HasSubstr("does not keep to the protocol")) << line;
  }
}

/// Runs a head whose only node is a script instead of ssh. The script prints `answer` after the
/// job's mark, and `end` after the head's next message.
ProgramResult head_told(const std::string& answer, const std::string& end = "") {
  const TempFolder folder;
  const auto node = folder.write(
      "node",
      "#!/bin/sh\nread -r job\n"
      "mark=$(printf '%s\\n' \"$job\" | sed 's/.*\"mark\":\"\\([^\"]*\\)\".*/\\1/')\n" +
          fmt::format("printf '%s%s\\n' $mark '{}' >&2\nread -r go\n"
                      "printf '%s%s\\n' $mark '{}' >&2\n",
                      answer, end) +
          "exec sleep 1000\n",
      true);
  return launch({"--hosts=me@a,me@b", "--ssh_command=" + node,
                 "--report=" + (folder / "report").string(), "true"});
}

TEST(SshHeadTest, ANodeWhoseAnswerMakesNoSenseIsNamed) {
  for (const char* answer :
       {"hello", R"({"type":"ended","exit_code":0,"report":"{\"failure\":null}"})"}) {
    const auto result = head_told(answer);
    EXPECT_EQ(result.exit_code, 75) << answer;
    EXPECT_THAT(result.err, HasSubstr(fmt::format(
                                "error: me@a, me@b: its launcher does not keep to the protocol: it "
                                "sent '{}'\nsyncbn-launch: nothing has been started",
                                answer)));
  }
}

TEST(SshHeadTest, ANodeWhoseEndMakesNoSenseIsNamed) {
  for (const char* end : {"{", R"({"type":"ready","master_port":0})"}) {
    const auto result = head_told(R"({"type":"ready","master_port":0})", end);
    EXPECT_EQ(result.exit_code, 75) << end;
    for (const char* host : {"me@a", "me@b"}) {
      EXPECT_THAT(result.err, HasSubstr(fmt::format("error: the launcher on {} does not keep to "
                                                    "the protocol: it sent '{}'; its workers",
                                                    host, end)));
    }
  }
}

TEST(SshHeadTest, ACommandThatStartsNoLauncherIsNamed) {
  for (const auto& [command, end] : {std::pair{"true", "exit code 0"},
                                     std::pair{"sh -c 'echo no way >&2; exit 1'", "exit code 1"},
                                     std::pair{"sh -c 'kill -9 $$'", "killed by signal 9"}}) {
    const auto result =
        launch({"-H", "me@a,me@b", std::string("--ssh_command=") + command, "true"});
    EXPECT_EQ(result.exit_code, 75) << command;
    const std::string program = std::string(command).substr(0, 2) == "sh" ? "sh" : "true";
    EXPECT_THAT(result.err, AllOf(HasSubstr("error: me@a, me@b: " + program +
                                            " has not started the launcher there (" + end),
                                  HasSubstr("nothing has been started")));
  }
}

TEST(SshHeadTest, AnInterruptWhileNamesAreLookedUpEndsIt) {
  const TempFolder folder;
  const std::string trace = folder / "trace";
  Program head(launch_command({"--hosts=a,b", "true"}),
               {.env = {{"LD_PRELOAD", SYNCBN_DEAD_SERVERS},
                        {"DEAD_SERVERS_TRACE", trace},
                        // A sanitizer's runtime library insists on being loaded first.
                        {"ASAN_OPTIONS", "verify_asan_link_order=0"}}});
  ASSERT_TRUE(head.wait_until([&] { return fs::exists(trace); }));
  head.end_by(SIGINT);
}

}  // namespace
}  // namespace syncbn::test

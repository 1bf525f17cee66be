// Faults between launchers: silence, strangers and malformed messages.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/store_greeting.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "launch/stranger.h"
#include "support/connection.h"
#include "support/eventually.h"
#include "support/listener.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kLittlePatience =
    "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=6";
// Longer than those 6 s.
constexpr std::chrono::seconds kSilence{8};

/// CPU time of the process without its children.
double cpu_seconds(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  std::istringstream rest(stat.substr(stat.rfind(')') + 2));
  std::string skipped;
  for (int field = 3; field < 14; ++field) rest >> skipped;
  double user = 0;
  double system = 0;
  rest >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

TEST(LaunchClusterFaultTest, AProgramThatIsMissingOnOneNodeEndsTheJob) {
  Nodes nodes(2);
  Program& first = nodes.start(0, 1, {"--rdzv_conf=join_timeout=60"}, {"touch", "started"});
  connect_to(nodes.port());  // waits until node 0 listens
  const auto second = nodes.start(1, 1, {}, {"./missing"}).wait();
  EXPECT_EQ(second.exit_code, 127);
  EXPECT_THAT(second.err, HasSubstr("program not found: there is no file ./missing"));
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, ContainsRegex("node 1 \\(.*\\): program not found"));
  EXPECT_FALSE(nodes.has("started"));
}

/// Starts a job on two nodes with little patience, and waits for its workers.
void start_impatient(Nodes& nodes) {
  nodes.start_all(1, {kLittlePatience}, until_go());
  ASSERT_TRUE(nodes[0].wait_until([&] { return nodes.both_are_up(); }));
}

TEST(LaunchSilenceTest, ALauncherThatFallsSilentIsLost) {
  std::array<Nodes, 2> jobs{Nodes(2), Nodes(2)};
  for (const size_t silent : {0U, 1U}) {
    start_impatient(jobs[silent]);
    jobs[silent][silent].send_signal(SIGSTOP);
  }
  for (const size_t silent : {0U, 1U}) {
    const auto result = jobs[silent][1 - silent].wait();
    EXPECT_EQ(result.exit_code, 75);
    EXPECT_THAT(result.err, AllOf(HasSubstr(fmt::format("node {}", silent)), HasSubstr("is gone")));
    jobs[silent][silent].send_signal(SIGCONT);
    EXPECT_EQ(jobs[silent][silent].wait().exit_code, 75);
  }
}

// SIGTSTP, which a terminal sends to its foreground processes.
TEST(LaunchSilenceTest, ControlZIsNoSilence) {
  std::array<Nodes, 2> jobs{Nodes(2), Nodes(2)};
  for (const size_t stopped : {0U, 1U}) {
    start_impatient(jobs[stopped]);
    Program& launcher = jobs[stopped][stopped];
    launcher.send_signal(SIGTSTP);
    ASSERT_TRUE(eventually([&] { return state_of(launcher.pid()) == 'T'; }));
  }
  std::this_thread::sleep_for(kSilence);
  for (const size_t stopped : {0U, 1U}) {
    EXPECT_TRUE(jobs[stopped][1 - stopped].running());
    jobs[stopped][stopped].send_signal(SIGCONT);
  }
  // The missed heartbeats must have no effect for the same time again.
  std::this_thread::sleep_for(kSilence);
  for (Nodes& nodes : jobs) {
    nodes.folder().write("go", "");
    for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST(LaunchSilenceTest, AStoppedNodeDoesNotKeepTheOthersFromEnding) {
  Nodes nodes(2);
  Program& node0 =
      nodes.start(0, 1, {kLittlePatience},
                  shell("touch up0; while [ ! -e fail ]; do sleep 0.01; done; exit 7"));
  Program& node1 = nodes.start(1, 1, {kLittlePatience}, until_go());
  ASSERT_TRUE(node0.wait_until([&] { return nodes.both_are_up(); }));
  node1.send_signal(SIGTSTP);
  ASSERT_TRUE(eventually([&] { return state_of(node1.pid()) == 'T'; }));
  nodes.folder().write("fail", "");
  EXPECT_EQ(node0.wait().exit_code, 7);
  node1.send_signal(SIGCONT);
  EXPECT_NE(node1.wait().exit_code, 0);
}

/// Runs the command once the file "go" exists.
std::vector<std::string> when_told(const std::string& command) {
  return shell("while [ ! -e go ]; do sleep 0.01; done; exec " + command);
}

/// The output of `syncbn-launch explain` for the file that node 0 names after these words.
std::string explained(
    const std::string& err,
    const std::string& command = "the latest calls of all ranks: syncbn-launch explain ") {
  const size_t begin = err.find(command) + command.size();
  EXPECT_GE(begin, command.size()) << err;
  return run_program(
             {kLauncher, "explain", err.substr(begin, err.find_first_of("\n;", begin) - begin)})
      .out;
}

/// Waits until the launcher's ranks have printed "up".
bool are_up(Program& launcher, std::initializer_list<int> ranks) {
  return std::ranges::all_of(
      ranks, [&](int rank) { return launcher.wait_for_out(fmt::format("[{}] up", rank)); });
}

TEST(LaunchClusterFaultTest, NodeZeroWritesTheCallsOfAllRanksOfAFailedAttempt) {
  Nodes nodes(2);
  Program& node0 = nodes.start(0, 2, {}, {kAgentWorker, "calls", "5", "print", "up", "wait"});
  nodes.start(1, 1, {}, when_told(kAgentWorker + " calls 3 fail 7"));
  ASSERT_TRUE(are_up(node0, {0, 1}));
  nodes.folder().write("go", "");
  const auto result = node0.wait();
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(
      explained(result.err),
      AllOf(HasSubstr("3 ranks, at "), HasSubstr("rank 2 failed: exit code 7"),
            HasSubstr("#5 of group 'all', all_reduce of Float:\n  ranks 0 to 1 wait in it"),
            ContainsRegex("rank 2 \\(.*\\) has not come to it: its last call of this group is "
                          "#3, all_reduce of Float"),
            Not(HasSubstr("missing")), Not(HasSubstr("Nothing is recorded"))));
}

TEST(LaunchClusterFaultTest, EachLauncherExplainsTheRanksOfAllNodesWhileTheyRun) {
  Nodes nodes(2);
  Program& node0 = nodes.start(0, 2, {}, {kAgentWorker, "calls", "5", "print", "up", "wait"});
  Program& node1 = nodes.start(1, 1, {}, {kAgentWorker, "calls", "3", "print", "up", "wait"});
  ASSERT_TRUE(are_up(node0, {0, 1}) && are_up(node1, {2}));
  const auto has_all =
      AllOf(HasSubstr("3 ranks, at "), HasSubstr(": as it is now"),
            HasSubstr("#5 of group 'all', all_reduce of Float:\n  ranks 0 to 1 wait in it"),
            ContainsRegex("rank 2 \\(.*\\) has not come to it: its last call of this group is #3"),
            Not(HasSubstr("missing")), Not(HasSubstr("Nothing is recorded")));
  const std::string saved = nodes.folder() / "now.jsonl";
  for (Program* launcher : {&node0, &node1, &node0}) {
    ProgramResult result;
    launcher->wait_until([&] {  // it waits 1.5 s for the other node
      result =
          run_program({kLauncher, "explain", "--save=" + saved, std::to_string(launcher->pid())});
      return result.out.find("missing") == std::string::npos;
    });
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, has_all);
    EXPECT_EQ(run_program({kLauncher, "explain", saved}).out, result.out);
  }
  node0.send_signal(SIGTERM);
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 143) << result.err;
}

TEST(LaunchClusterFaultTest, WaitsWithoutBeingBusy) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {}, until_go());
  Program& node = nodes.start(
      1, 1, {},
      shell("trap 'touch told; while [ ! -e go ]; do sleep 0.01; done; exit 0' TERM; touch up1; "
            "while true; do sleep 0.01; done"));
  ASSERT_TRUE(lead.wait_until([&] { return nodes.both_are_up(); }));
  lead.send_signal(SIGKILL);
  ASSERT_TRUE(node.wait_until([&] { return nodes.has("told"); }));
  const double before = cpu_seconds(node.pid());
  std::this_thread::sleep_for(std::chrono::seconds(2));  // the span that is measured
  EXPECT_LT(cpu_seconds(node.pid()) - before, 0.5);
  nodes.folder().write("go", "");
  EXPECT_EQ(node.wait().exit_code, 75);
}

TEST(LaunchClusterFaultTest, SilentConnectionsDoNotKeepNodesOut) {
  Nodes nodes(2);
  // So few descriptors that the silent connections use them all.
  std::string command = "ulimit -n 64; exec";
  for (const std::string& word :
       launch_command({"--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1",
                       fmt::format("--master_port={}", nodes.port()), "true"})) {
    command += " '" + word + "'";
  }
  Program lead({"bash", "-c", command}, {.env = {{"OMP_NUM_THREADS", "1"}}});
  std::vector<base::UniqueFd> silent;
  silent.reserve(100);
  for (int i = 0; i < 100; ++i) silent.push_back(connect_to(nodes.port()));
  const auto result = nodes.start(1, 1, {}, {"true"}).wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lead.wait().exit_code, 0);
}

TEST(LaunchClusterFaultTest, AMasterThatSaysNothingIsWaitedForAsLongAsOneThatIsNotThere) {
  const Listener master;
  const auto result =
      launch({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
              fmt::format("--master_port={}", master.port),
              "--rdzv_conf=join_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=1", "true"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("did not answer at"));
  EXPECT_THAT(result.err, HasSubstr("(no answer to our greeting)"));
}

/// A launcher of node 1, and a store instead of node 0's launcher. Like torchrun's store, it closes
/// a connection that begins with a launcher's greeting.
struct NodeOfTorchrun {
  NodeOfTorchrun()
      : node(launch_command({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                             fmt::format("--master_port={}", store.port), "true"})) {
    accept();
  }

  base::UniqueFd accept() { return base::UniqueFd(::accept(store.fd.get(), nullptr, nullptr)); }

  const Listener store;
  Program node;
};

TEST(LaunchClusterFaultTest, ATorchrunThatIsPreemptedIsWaitedFor) {
  NodeOfTorchrun torchrun;
  base::UniqueFd client = torchrun.accept();
  std::string greeting = base::store_greeting(0);
  ASSERT_EQ(::recv(client.get(), greeting.data(), greeting.size(), MSG_WAITALL), greeting.size());
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));  // a limit of 2 s would fail
  ASSERT_TRUE(send_to(client, greeting.substr(greeting.size() - sizeof(uint32_t))));
  char query = 0;
  ASSERT_EQ(::recv(client.get(), &query, 1, 0), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(5200));  // a limit of 5 s would fail
  ASSERT_TRUE(send_to(client, std::string(sizeof(int64_t), '\1')));
  EXPECT_TRUE(torchrun.node.wait_for_err("torchrun runs node 0 at"));
  client.reset();
  const auto result = torchrun.node.wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("torchrun's node 0 is gone"));
}

TEST(LaunchClusterFaultTest, ASignalEndsTheWaitForATorchrun) {
  NodeOfTorchrun torchrun;
  const base::UniqueFd client = torchrun.accept();
  EXPECT_THAT(torchrun.node.end_by(SIGTERM).err, Not(HasSubstr("closed the connection")));
}

TEST(LaunchClusterFaultTest, WhatClosesBothConnectionsIsNeitherALauncherNorTorchrun) {
  NodeOfTorchrun torchrun;
  int connections = 1;
  while (torchrun.node.running()) {
    pollfd more{torchrun.store.fd.get(), POLLIN, 0};
    for (; ::poll(&more, 1, 50) > 0; ++connections) torchrun.accept();
  }
  const auto result = torchrun.node.wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("closed the connection"));
  EXPECT_EQ(connections, 10) << "five times one of each";
}

TEST(LaunchClusterFaultTest, AMissingProgramIsToldToANodeZeroThatStartsLater) {
  const BoundPort master;
  Program node(launch_command({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                               fmt::format("--master_port={}", master.port), "./missing"}));
  std::this_thread::sleep_for(std::chrono::milliseconds(2800));  // a limit of 2 s would fail
  ASSERT_EQ(::listen(master.fd.get(), 1), 0);
  pollfd ready{master.fd.get(), POLLIN, 0};
  ASSERT_TRUE(node.wait_until([&] { return ::poll(&ready, 1, 0) > 0; }));
  base::UniqueFd(::accept(master.fd.get(), nullptr, nullptr)).reset();
  EXPECT_EQ(node.wait().exit_code, 127);
}

TEST(LaunchClusterFaultTest, NonsenseFromTheMasterIsALostConnection) {
  constexpr const char* one_rank =
      R"({"type":"start","attempt":0,"restart_count":0,"reason":"","job_id":"","node":0,"nodes":1,)"
      R"("master_addr":"a","master_port":1,"agent_store":true,"ranks":[1]})";
  for (const char* nonsense : {R"({"type":"start"})", R"({"type":"finish","exit_code":"no"})",
                               one_rank, "[]", "no JSON"}) {
    const Listener master;
    Program node(launch_command({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                                 fmt::format("--master_port={}", master.port), "true"}));
    const base::UniqueFd peer(::accept(master.fd.get(), nullptr, nullptr));
    ASSERT_TRUE(send_to(peer, std::string(nonsense) + "\n"));
    const auto result = node.wait();
    EXPECT_EQ(result.exit_code, 75) << nonsense;
    EXPECT_THAT(result.err, AllOf(HasSubstr("node 0 at 127.0.0.1"), Not(HasSubstr("internal"))))
        << nonsense;
  }
}

TEST(LaunchClusterFaultTest, AnUnknownMessageIsNamedOnceAndEndsTheConnection) {
  JobWithStranger job;
  send_to(job.stranger, "{\"type\":\"gossip\"}\n{\"type\":\"gossip\"}\n");
  const auto result = job.lead.wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_EQ(count(result.err, "node 0 does not understand a message of this launcher"), 1);
}

TEST(LaunchClusterFaultTest, NonsenseFromALauncherIsRefused) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {}, {"true"});
  std::vector<base::UniqueFd> strangers;
  for (const std::string& text :
       {kAgentGreeting + hello("a", "7"), kAgentGreeting + hello("a", "1", "0"),
        kAgentGreeting + hello("a", "1", "2000000000"), kAgentGreeting + hello("a", "1", "\"x\""),
        kAgentGreeting + std::string("{\"type\":\"hello\",\"node\":1}\n"),
        kAgentGreeting + std::string("{\"type\":\"failed\"}\n"),
        std::string("GET / HTTP/1.1\r\n\r\n"), std::string(1 << 20, 'x')}) {
    strangers.push_back(connect_to(nodes.port()));
    send_to(strangers.back(), text);
  }
  EXPECT_TRUE(lead.running());
  EXPECT_EQ(nodes.start(1, 1, {}, {"true"}).wait().exit_code, 0);
  const auto result = lead.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

}  // namespace
}  // namespace syncbn::test

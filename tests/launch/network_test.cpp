// Ports and several nodes, as several launchers on one host and in network namespaces.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <memory>
#include <set>

#include "launch/launcher.h"
#include "support/listener.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/two_hosts.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(LaunchNetworkTest, JobsStartedTogetherGetDistinctPorts) {
  constexpr size_t kJobs = 20;
  TempFolder folder;
  std::vector<std::unique_ptr<Program>> jobs;
  for (size_t i = 0; i < kJobs; ++i) {
    // Each job holds its port until all jobs have one.
    jobs.push_back(std::make_unique<Program>(
        launch_command({"sh", "-c", "echo $MASTER_PORT; while [ ! -e go ]; do sleep 0.01; done"}),
        RunProgramOptions{.cwd = folder.path()}));
  }
  std::set<std::string> ports;
  for (const auto& job : jobs) {
    ASSERT_TRUE(job->wait_until([&] { return !job->out().empty(); }));
    ports.insert(job->out());
  }
  EXPECT_EQ(ports.size(), kJobs);
  folder.write("go", "");
  for (const auto& job : jobs) EXPECT_EQ(job->wait().exit_code, 0);
}

TEST(LaunchNetworkTest, RankZeroCanListenOnThePortThatIsHeldForIt) {
  TempFolder folder;
  Program job(
      launch_command({"sh", "-c", "echo $MASTER_PORT; while [ ! -e go ]; do sleep 0.01; done"}),
      {.cwd = folder.path()});
  ASSERT_TRUE(job.wait_until([&] { return !job.out().empty(); }));
  const int port = std::atoi(job.out().c_str());
  // With SO_REUSEADDR, as TCPStore listens.
  EXPECT_EQ(Listener(port, INADDR_ANY).port, port);
  folder.write("go", "");
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(LaunchNetworkTest, NamesAPortThatIsInUseBeforeAnythingStarts) {
  const Listener other(0, INADDR_ANY);
  const auto result = launch({fmt::format("--master_port={}", other.port), "echo", "started"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(HasSubstr(fmt::format("port {} ", other.port)),
                                HasSubstr("Address already in use")));
}

TEST(LaunchNetworkTest, ZeroAsksForAFreePort) {
  const auto result = launch({"--master_port=0", "sh", "-c", "echo $MASTER_PORT"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GT(std::atoi(result.out.c_str()), 0);
}

TEST(LaunchNetworkTest, AGivenPortReachesTheWorkers) {
  const int port = free_port();
  const auto result = launch({fmt::format("--master_port={}", port), "--master_addr=localhost",
                              "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT"});
  EXPECT_EQ(result.out, fmt::format("localhost {}\n", port));
}

TEST(LaunchNetworkTest, AStrangersAddressAloneIsRefusedOnOneMachine) {
  // TEST-NET-1: an address that no host has.
  const auto result = launch({"--master_addr=192.0.2.1", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("192.0.2.1 is not an address of this machine"));
}

// Rank 0 gets every other rank's number and prints their sum; the others send theirs.
constexpr const char* kSumOfRanks = R"(import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    print("sum", sum(int(server.accept()[0].makefile().readline()) for _ in range(world - 1)))
else:
    while True:
        try:
            with socket.create_connection(address) as connection:
                connection.sendall(f"{rank}\n".encode())
                break
        except ConnectionRefusedError:
            time.sleep(0.01)
)";

TEST(LaunchNetworkTest, NodesInTwoNetworksMeetAtTheMastersAddress) {
  const TwoHosts hosts;
  SYNCBN_SKIP_UNLESS(hosts.available(), "netns");
  TempFolder folder;
  const std::string script = folder.write("sum.py", kSumOfRanks);
  const auto node = [&](int rank) {
    return hosts.on(
        rank,
        launch_command({"--nnodes=2", fmt::format("--node_rank={}", rank), "--nproc_per_node=2",
                        "--master_addr=" + TwoHosts::address(0), "--master_port=29501", script}));
  };
  // Otherwise the launcher's own store would use that port.
  const RunProgramOptions options{.env = {{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}}};
  Program first(node(0), options);
  Program second(node(1), options);
  EXPECT_EQ(second.wait().exit_code, 0);
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] sum 6\n");
}

TEST(LaunchNetworkTest, AMasterWithSeveralAddressesIsFoundAtTheOneThatAnswers) {
  const TwoHosts hosts;
  SYNCBN_SKIP_UNLESS(hosts.available(), "netns");
  const auto node = [&](int rank, const std::string& master) {
    return hosts.on(rank, launch_command({"--nnodes=2", fmt::format("--node_rank={}", rank),
                                          "--master_addr=" + master, "true"}));
  };
  Program first(node(0, TwoHosts::address(0)));
  Program second(node(1, "both0"));
  EXPECT_EQ(second.wait().exit_code, 0) << second.err();
  EXPECT_EQ(first.wait().exit_code, 0) << first.err();
}

}  // namespace
}  // namespace syncbn::test

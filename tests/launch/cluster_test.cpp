// Several nodes: launchers on one host that find each other only through --master_addr.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>

#include <nlohmann/json.hpp>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(LaunchClusterTest, AFailureEndsEveryNodeWithTheFailedWorkersCode) {
  Nodes nodes(3);
  nodes.start(0, 2, {}, shell("touch up0; exec sleep 1000"));
  nodes.start(1, 2, {},
              shell("[ $RANK = 3 ] && exec sleep 1000; "
                    "while [ ! -e up0 ] || [ ! -e up2 ]; do sleep 0.01; done; exit 7"));
  nodes.start(2, 1, {}, shell("touch up2; exec sleep 1000"));
  ASSERT_TRUE(eventually([&] { return nodes.has("up0") && nodes.has("up2"); }));
  EXPECT_TRUE(nodes.end_promptly());
  const auto results = nodes.wait();
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, 7);
    EXPECT_THAT(result.err, HasSubstr("rank 2 failed: exit code 7"));
  }
  EXPECT_THAT(results[0].err, HasSubstr("ending the workers of this node"));
}

TEST(LaunchClusterTest, OfFailuresAtTheSameTimeTheReportsHoldTheOneOfTheExitCode) {
  Nodes nodes(3);
  const auto program =
      shell("touch up$RANK; while [ ! -e go$RANK ]; do sleep 0.01; done; exit $((6 + RANK))");
  for (int node = 0; node < 3; ++node) {
    nodes.start(node, 1, {fmt::format("--report=report{}", node)}, program);
  }
  for (int node = 0; node < 3; ++node) {
    ASSERT_TRUE(nodes[node].wait_until([&] { return nodes.has(fmt::format("up{}", node)); }));
  }
  // Node 0 gets both failures at once.
  nodes[0].send_signal(SIGSTOP);
  for (int node = 1; node < 3; ++node) {
    nodes.folder().write(fmt::format("go{}", node), "");
    const std::string report = fmt::format("rank {0} failed: exit code {1}\n", node, 6 + node);
    ASSERT_TRUE(nodes[node].wait_for_err(report));
  }
  nodes[0].send_signal(SIGCONT);
  const auto results = nodes.wait();
  const int code = results[0].exit_code;
  EXPECT_THAT(code, AnyOf(7, 8));
  for (int node = 0; node < 3; ++node) {
    EXPECT_EQ(results[node].exit_code, code);
    const auto report =
        nlohmann::json::parse(base::read_file(nodes.folder() / fmt::format("report{}", node)));
    EXPECT_EQ(report["exit_code"], code);
    if (node + 6 == code) {
      EXPECT_EQ(report["failure"]["exit_code"], code);
    } else {
      EXPECT_TRUE(report["failure"].is_null()) << report;
    }
  }
}

TEST(LaunchClusterTest, ASignalToOneLauncherEndsTheJob) {
  for (const size_t signalled : {0U, 1U}) {
    Nodes nodes(2);
    // The worker without the signal takes longer to end.
    nodes.start_all(1, {},
                    shell("trap 'sleep 0.2; exit 0' TERM; touch up$RANK; "
                          "while true; do sleep 0.01; done"));
    nodes[0].wait_until([&] { return nodes.both_are_up(); });
    nodes[signalled].send_signal(SIGINT);
    EXPECT_TRUE(nodes.end_promptly());
    const auto results = nodes.wait();
    EXPECT_EQ(results[0].exit_code, 130);
    EXPECT_EQ(results[1].exit_code, 130);
    EXPECT_THAT(results[1 - signalled].err, HasSubstr(fmt::format("node {} (", signalled)));
  }
}

// First more than a pipe holds but less than a launcher keeps; then more than both.
constexpr const char* kTalkative = "yes | head -c 100000; touch talks$RANK; exec yes";

TEST(LaunchClusterTest, AFailureEndsTheOtherNodesWhileNobodyReadsTheirOutput) {
  Nodes nodes(2);
  nodes.start(0, 1, {}, shell(kTalkative));
  nodes.start(1, 1, {}, shell("while [ ! -e talks0 ]; do sleep 0.01; done; exit 7"));
  ASSERT_TRUE(eventually([&] { return nodes.has("talks0"); }));
  EXPECT_TRUE(nodes.end_promptly());
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 7);
}

TEST(LaunchClusterTest, ALauncherThatIsKilledEndsTheJob) {
  for (const size_t victim : {0U, 1U}) {
    Nodes nodes(2);
    nodes.start_all(1,
                    {"--rdzv_conf=keep_alive_interval=100"},  // silence would be noticed too late
                    shell("touch up$RANK; exec sleep 1000"));
    nodes[0].wait_until([&] { return nodes.both_are_up(); });
    nodes[victim].send_signal(SIGKILL);
    EXPECT_TRUE(nodes.end_promptly());
    const auto result = nodes[1 - victim].wait();
    EXPECT_EQ(result.exit_code, 75);
    EXPECT_THAT(result.err, AllOf(HasSubstr(fmt::format("node {}", victim)), HasSubstr("is gone")));
  }
}

TEST(LaunchClusterTest, ALauncherThatIsKilledWhileItWaitsLeavesNoFolder) {
  TempFolder folder;
  Program node(launch_command({"--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1",
                               fmt::format("--master_port={}", free_port()), "true"}),
               {.env = {{"OMP_NUM_THREADS", "1"}, {"TMPDIR", folder.path()}}});
  node.wait_until([&] {
    const auto status = run_program({kLauncher, "status", std::to_string(node.pid())});
    return status.out.find("waits for nodes") != std::string::npos;
  });
  node.end_by(SIGKILL);
  EXPECT_TRUE(folder.empty());
}

TEST(LaunchClusterTest, MistakesAreNamedAtOnce) {
  const auto refused = [](const std::vector<std::string>& options) {
    Nodes nodes(3);
    Program& first = nodes.start(0, 1, {}, {"true"});
    nodes.start(1, 1, {}, {"true"});
    Program& odd = nodes.start(1, 1, options, {"true"});
    const auto result = odd.wait();
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_TRUE(first.wait_for_err("refused a launcher: "));
    return result.err;
  };
  EXPECT_THAT(refused({"--nnodes=2"}), HasSubstr("--nnodes=2, and node 0 with --nnodes=3"));
  EXPECT_THAT(refused({"--max_restarts=2"}), HasSubstr("--max_restarts=2"));
  EXPECT_THAT(refused({"--rdzv_id=other"}), HasSubstr("belongs to job 'other'"));
}

TEST(LaunchClusterTest, SaysThatNode0DidNotAnswer) {
  Nodes nodes(2);
  nodes.start(1, 1, {"--rdzv_conf=join_timeout=1"}, {"true"});
  const auto result = nodes.wait().front();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, AllOf(HasSubstr(fmt::format("127.0.0.1:{}", nodes.port())),
                                HasSubstr("Connection refused")));
}

TEST(LaunchClusterTest, SaysAtOnceThatAMasterAddressIsNobodys) {
  for (const int rank : {0, 1}) {
    Nodes nodes(2);
    Program& node = nodes.start(rank, 1, {"--master_addr=nobody.invalid"}, {"true"});
    // Node 0 itself notices that the name has no address.
    const std::string said = rank == 0 ? "--master_addr=nobody.invalid is not an address of this "
                                         "machine, which is node 0"
                                       : "cannot find nobody.invalid";
    EXPECT_TRUE(node.wait_for_err(said));
  }
}

TEST(LaunchClusterTest, ASignalEndsTheWaitForOthers) {
  Nodes nodes(2);
  Program& alone = nodes.start(0, 1, {"--rdzv_conf=join_timeout=1000"}, {"true"});
  Program& lost = nodes.start(1, 1, {"--master_port=1"}, {"true"});
  for (Program* program : {&alone, &lost}) {
    program->wait_until([&] { return launcher_blocks(program->pid(), SIGINT); });
    EXPECT_THAT(program->end_by(SIGINT).err, HasSubstr("ended by SIGINT"));
  }
}

TEST(LaunchClusterTest, NodesOfTheC10dBackendNeedNoRank) {
  const std::string endpoint = fmt::format("--rdzv_endpoint=127.0.0.1:{}", free_port());
  const auto command =
      launch_command({"--nnodes=2", "--rdzv_backend=c10d", endpoint, "--rdzv_id=job", "sh", "-c",
                      "echo rank $RANK of $WORLD_SIZE, job $TORCHELASTIC_RUN_ID"});
  Program one(command);
  Program other(command);
  const auto first = one.wait();
  const auto second = other.wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(first.out + second.out, AllOf(HasSubstr("[0] rank 0 of 2, job job\n"),
                                            HasSubstr("[1] rank 1 of 2, job job\n")));
}

}  // namespace
}  // namespace syncbn::test

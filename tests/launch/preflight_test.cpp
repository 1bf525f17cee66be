// --preflight: what it makes of the figures of all nodes, and its jobs.
#include <gmock/gmock.h>
#include <syncbn/base/error.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "preflight/link_check.h"
#include "preflight/machine_figures.h"
#include "support/connection.h"

namespace syncbn::test {
namespace {

using launch::MachineFigures;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

/// Three nodes that are alike, but for what `change` does to the second.
launch::PreflightFindings judge(const std::function<void(MachineFigures&)>& change) {
  std::vector<MachineFigures> nodes(
      3, {.host = "a",
          .versions = {{"syncbn-launch", "1.0"}, {"glibc", "2.36"}, {"NVIDIA driver", ""}},
          .cores = 4,
          .core_rate = 9e9,
          .slowest_rate = 8e9,
          .memory = 1'000'000'000,
          .disk_rate = 1e9,
          .open_files = 1000,
          .processes = 1000,
          .shared_memory = 1'000'000,
          .round_trip = 1e-3,
          .link_rate = 1e9});
  change(nodes[1]);
  nodes[1].host = "b";
  return launch::judge(nodes);
}

TEST(LaunchPreflightTest, NamesWhatIsUnlikeTheOtherNodes) {
  const auto outlier = [](const std::function<void(MachineFigures&)>& change) {
    const auto findings = judge(change);
    EXPECT_THAT(findings.failures, IsEmpty());
    return findings.outliers;
  };
  EXPECT_THAT(outlier([](auto&) {}), IsEmpty());
  EXPECT_THAT(outlier([](auto& node) { node.core_rate = 7e9; }), IsEmpty());
  EXPECT_THAT(outlier([](auto& node) { node.core_rate = node.slowest_rate = 5e9; }),
              ElementsAre("node 1 (b): its median core computes at 5.0 GFLOP/s, and the median of "
                          "all nodes is 9.0 GFLOP/s"));
  EXPECT_THAT(outlier([](auto& node) {
                node.slowest_rate = 4e9;
                node.slowest_core = 3;
              }),
              ElementsAre("node 1 (b): core 3 computes at 4.0 GFLOP/s, and the median core at 9.0 "
                          "GFLOP/s"));
  EXPECT_THAT(outlier([](auto& node) { node.disk_rate = 1e8; }),
              ElementsAre(HasSubstr("node 1 (b): its disk takes 100.0 MB/s")));
  EXPECT_THAT(outlier([](auto& node) { node.link_rate = 1e8; }),
              ElementsAre(HasSubstr("node 1 (b): to the next node it sends 100.0 MB/s")));
  EXPECT_THAT(outlier([](auto& node) { node.round_trip = 5e-3; }),
              ElementsAre(HasSubstr("node 1 (b): a round trip to node 2 (a) takes 5 ms")));
  EXPECT_THAT(outlier([](auto& node) { node.clock_ahead = 3600; }),
              ElementsAre(HasSubstr("node 2 (a): its clock is 1 h 0 min ahead of node 0's")));
  EXPECT_THAT(outlier([](auto& node) { node.open_files = 100; }),
              ElementsAre("node 1 (b): 100 open files (ulimit -Hn), and the median of all nodes is "
                          "1000"));
  EXPECT_THAT(outlier([](auto& node) { node.memory = 400'000'000; }),
              ElementsAre("node 1 (b): 400.0 MB of available memory, and the median of all nodes "
                          "is 1.0 GB"));
  EXPECT_THAT(outlier([](auto& node) { node.gpus = 2; }),
              ElementsAre("node 1 (b): 2 GPUs, and node 0 (a) has 0 GPUs"));
  EXPECT_THAT(outlier([](auto& node) {
                node.versions = {
                    {"syncbn-launch", "1.1"}, {"glibc", "2.31"}, {"NVIDIA driver", "550.54.15"}};
              }),
              UnorderedElementsAre(
                  "node 1 (b): syncbn-launch 1.1, and node 0 (a) has syncbn-launch 1.0",
                  "node 1 (b): glibc 2.31, and node 0 (a) has glibc 2.36",
                  "node 1 (b): NVIDIA driver 550.54.15, and node 0 (a) has no NVIDIA driver"));
}

TEST(LaunchPreflightTest, NamesNodeZeroIfItIsUnlikeTheOthers) {
  std::vector<MachineFigures> nodes(3, {.host = "a", .versions = {{"glibc", "2.36"}}});
  nodes[0].versions["glibc"] = "2.31";
  nodes[0].host = "b";
  EXPECT_THAT(launch::judge(nodes).outliers,
              ElementsAre("node 0 (b): glibc 2.31, and node 1 (a) has glibc 2.36"));
}

TEST(LaunchPreflightTest, NamesWhyTheJobWouldFail) {
  EXPECT_THAT(judge([](auto& node) { node.disk_error = "/data: Read-only file system"; }).failures,
              ElementsAre("node 1 (b) cannot write to /data: Read-only file system"));
  EXPECT_THAT(judge([](auto& node) { node.link_error = "no connection"; }).failures,
              ElementsAre("node 1 (b) cannot reach node 2 (a): no connection"));
}

TEST(LaunchPreflightTest, FiguresSurviveTheirJourney) {
  MachineFigures figures = launch::measure_machine(".");
  figures.clock_ahead = -0.5;
  EXPECT_EQ(MachineFigures::of(figures.json()).json(), figures.json());
  EXPECT_THAT(figures.versions, AllOf(Contains(Key("NVIDIA driver")),
                                      Contains(Pair("syncbn-launch", SYNCBN_VERSION))));
  EXPECT_GT(figures.core_rate, 0);
  EXPECT_GT(figures.disk_rate, 0) << figures.disk_error;
}

TEST(LaunchPreflightTest, AConnectionIsMeasuredWithTheClockOfTheOtherEnd) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const launch::LinkServer server("0123456789abcdef", soon);
  // A stranger is turned away, and does not keep the expected one out.
  launch::LinkProbe stranger("127.0.0.1", server.port(), "fedcba9876543210", soon);
  EXPECT_THROW(stranger.measure_trip(), std::exception);
  launch::LinkProbe probe("127.0.0.1", server.port(), "0123456789abcdef", soon);
  const auto trip = probe.measure_trip();
  EXPECT_LT(trip.seconds, 1);
  EXPECT_LT(std::abs(trip.clock_ahead), 1);
  EXPECT_GT(probe.measure_rate(soon), 1e4);
}

TEST(LaunchPreflightTest, TheRateHasADeadlineOfItsOwn) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const std::string id = "0123456789abcdef";
  const launch::LinkServer server(id, soon);
  launch::LinkProbe probe("127.0.0.1", server.port(), id, soon);
  EXPECT_THROW(probe.measure_rate(std::chrono::steady_clock::now()), base::UnavailableError);
}

TEST(LaunchPreflightTest, ANodeThatIsPreemptedBeforeItSendsTheIdKeepsNobodyOutAndIsMeasured) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const std::string id = "0123456789abcdef";
  const launch::LinkServer server(id, soon);
  const base::UniqueFd preempted = connect_to(server.port());
  const base::UniqueFd halfway = connect_to(server.port());
  ASSERT_TRUE(send_to(halfway, id.substr(0, 5)));
  EXPECT_LT(launch::LinkProbe("127.0.0.1", server.port(), id, soon).measure_trip().seconds, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // before: at most 2 s
  std::array<char, 8> time{};
  ASSERT_TRUE(send_to(halfway, id.substr(5) + "a"));
  EXPECT_EQ(::recv(halfway.get(), time.data(), time.size(), MSG_WAITALL), 8);
  ::shutdown(halfway.get(), SHUT_RDWR);
  ASSERT_TRUE(send_to(preempted, id + "a"));
  EXPECT_EQ(::recv(preempted.get(), time.data(), time.size(), MSG_WAITALL), 8);
}

TEST(LaunchPreflightTest, TheProgramStartsAfterTheCheckOnAllNodes) {
  for (const bool has_token : {false, true}) {
    Nodes nodes(2);
    std::vector<std::string> options{"--preflight"};
    if (has_token) {
      const std::string file = nodes.folder().write("token", "0123456789abcdef0123456789abcdef");
      std::filesystem::permissions(file, std::filesystem::perms(0600));
      options.push_back("--token_file=" + file);
    }
    for (int rank = 0; rank < 2; ++rank) {
      nodes.start(rank, 2, options, shell("echo rank $RANK attempt $SYNCBN_ATTEMPT"));
    }
    const auto results = nodes.wait();
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(results[0].out,
                AllOf(HasSubstr("node  host"), HasSubstr("\n   1  "), HasSubstr("B/s"),
                      HasSubstr("rank 0 attempt 0"), HasSubstr("rank 1 attempt 0")));
    EXPECT_THAT(results[1].out, AllOf(HasSubstr("rank 3 attempt 0"), Not(HasSubstr("host"))));
  }
}

TEST(LaunchPreflightTest, NothingStartsIfTheJobWouldFail) {
  const auto result = launch({"--preflight", "echo", "started"}, {.cwd = "/proc"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.out, AllOf(HasSubstr("cannot write to /proc"), Not(HasSubstr("started"))));
}

TEST(LaunchPreflightTest, ANodeWithoutTheOptionIsRefusedAndNamed) {
  for (const bool node_0_checks : {true, false}) {
    Nodes nodes(2);
    const std::vector<std::string> without = {"--rdzv_conf=join_timeout=3"};
    const std::vector<std::string> with = {"--preflight", "--rdzv_conf=join_timeout=3"};
    nodes.start(0, 1, node_0_checks ? with : without, shell("echo started"));
    nodes.start(1, 1, node_0_checks ? without : with, shell("echo started"));
    const auto results = nodes.wait();
    const std::string what = node_0_checks ? "out --preflight, and node 0 with it"
                                           : " --preflight, and node 0 without it";
    EXPECT_EQ(results[1].exit_code, 2);
    EXPECT_THAT(results[1].err, HasSubstr("was started with" + what));
    EXPECT_EQ(results[0].exit_code, 75);
    EXPECT_THAT(results[0].err, HasSubstr("was started with" + what));
    EXPECT_THAT(results[0].out + results[1].out, Not(HasSubstr("started")));
  }
}

TEST(LaunchPreflightTest, AHeadChecksItsHosts) {
  const auto result =
      launch({"--preflight", "--hosts=127.0.0.1:1,127.0.0.2:1", "sh", "-c", "echo started $RANK"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("\n   1  "), HasSubstr("started 0"), HasSubstr("started 1")));
}

}  // namespace
}  // namespace syncbn::test

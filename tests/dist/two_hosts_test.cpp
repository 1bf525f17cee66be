// Ranks on two hosts, which are network namespaces connected by a virtual cable.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>

#include <memory>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/text.h"
#include "support/two_hosts.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Rank {
  int host = 0;
  int rank = 0;
  std::string master = {};
};

class DistTwoHostsTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(hosts_.available(), "network-namespaces"); }

  /// Starts one rank of a job with two ranks on each host.
  Program& start(const Rank& who, const std::vector<std::string>& arguments = {}) {
    std::vector<std::string> command{SYNCBN_TEST_BIN_DIR "/dist_group_worker"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    RunProgramOptions options{.unset = {"GLOO_SOCKET_IFNAME"}};
    options.env = {{"RANK", std::to_string(who.rank)}, {"WORLD_SIZE", "4"},
                   {"LOCAL_WORLD_SIZE", "2"},          {"MASTER_ADDR", who.master},
                   {"MASTER_PORT", "29500"},           {"OMP_NUM_THREADS", "1"}};
    programs_.push_back(std::make_unique<Program>(hosts_.on(who.host, command), options));
    return *programs_.back();
  }

  void start_all(const std::string& master, const std::vector<std::string>& arguments = {}) {
    for (int rank = 0; rank < 4; ++rank) start({rank / 2, rank, master}, arguments);
  }

  void expect_one_group() {
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const ProgramResult result = programs_[rank]->wait();
      EXPECT_THAT(result.out, HasSubstr("sum 10, sent 30, gathered 0 1 2 3")) << result.err;
      // The hosts are two networks of one machine, so the processes see each other, whatever their
      // addresses.
      EXPECT_THAT(result.out, HasSubstr("through shared memory\n"));
      EXPECT_EQ(result.exit_code, 0) << result.err;
    }
  }

  /// The lines of host 0's sockets that listen on port 29500.
  std::string listening() {
    return run_program(hosts_.on(0, {"sh", "-c", "cat /proc/net/tcp* | grep ':733C .* 0A '"})).out;
  }

  void wait_for_store(Program& holder) {
    ASSERT_TRUE(holder.wait_until([&] { return !listening().empty(); }));
  }

  TwoHosts hosts_;
  std::vector<std::unique_ptr<Program>> programs_;
};

// Debian's 127.0.1.1: ranks 0 and 1 reach their own loopback, the others the cable.
TEST_F(DistTwoHostsTest, AHostsOwnNameMayLeadToItsLoopback) {
  start_all("node0");
  expect_one_group();
}

TEST_F(DistTwoHostsTest, TheStoreListensOnTheMastersAddressAlone) {
  for (const std::string& master : {std::string("node0"), TwoHosts::address(0)}) {
    programs_.clear();
    wait_for_store(start({0, 0, master}));
    const std::string sockets = listening();
    EXPECT_THAT(sockets, HasSubstr(": 01004D0A:733C ")) << "10.77.0.1";
    EXPECT_EQ(count(sockets, "\n"), 1) << sockets;
  }
}

TEST_F(DistTwoHostsTest, IPv6) {
  start_all(TwoHosts::address6(0));
  expect_one_group();
}

TEST_F(DistTwoHostsTest, TcpUrlWithIPv6) {
  start_all("", {fmt::format("tcp://[{}]:29500", TwoHosts::address6(0))});
  expect_one_group();
}

// The program is started on each host and spawns the ranks of its host.
TEST_F(DistTwoHostsTest, RanksThatAreSpawnedOnEachHost) {
  const std::string url = fmt::format("tcp://{}:29500", TwoHosts::address(0));
  for (const std::string method : {"fork", "exec"}) {
    programs_.clear();
    for (int node = 0; node < 2; ++node) {
      const std::vector<std::string> command{SYNCBN_TEST_BIN_DIR "/spawn_program", method, "sum",
                                             url, std::to_string(node)};
      const RunProgramOptions options{.unset = {"GLOO_SOCKET_IFNAME"}};
      programs_.push_back(std::make_unique<Program>(hosts_.on(node, command), options));
    }
    for (int node = 0; node < 2; ++node) {
      const ProgramResult result = programs_[static_cast<size_t>(node)]->wait();
      for (int local = 0; local < 2; ++local) {
        EXPECT_THAT(result.out, HasSubstr(fmt::format("rank {} of 4, local rank {}: sum 10\n",
                                                      2 * node + local, local)));
      }
      EXPECT_EQ(result.exit_code, 0) << method << ": " << result.err;
    }
  }
}

// A file does not tell how to reach a peer.
TEST_F(DistTwoHostsTest, RanksThatMeetInAFile) {
  const TempFolder folder;
  start_all("", {"file://" + (folder / "store").string()});
  expect_one_group();
  EXPECT_TRUE(folder.empty());
}

// Two nodes whose script uses the local rank as the rank, whichever of them arrives first.
TEST_F(DistTwoHostsTest, RanksThatBothHostsClaimAreToldToAll) {
  for (const bool right_first : {true, false}) {
    programs_.clear();
    const std::string master = TwoHosts::address(0);
    if (right_first) wait_for_store(start({0, 0, master}));
    start({1, 0, master});
    start({1, 1, master});
    if (!right_first) start({0, 0, master});
    start({0, 1, master});
    for (const auto& program : programs_) {
      const ProgramResult result = program->wait();
      EXPECT_EQ(result.exit_code, base::kExitUsage) << result.err;
      EXPECT_THAT(result.err, AllOf(HasSubstr(" was claimed by two processes: on host "),
                                    HasSubstr("passes LOCAL_RANK for the rank")));
    }
  }
}

}  // namespace
}  // namespace syncbn::test

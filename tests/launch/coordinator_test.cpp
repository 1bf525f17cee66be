// Node 0's coordinator with launchers that are connections of this process.
#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/held_port.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/handshake.h"
#include "common/json_messages.h"
#include "support/connection.h"
#include "support/eventually.h"

namespace syncbn::launch {
namespace {

using ::testing::ElementsAre;
using Json = nlohmann::json;

constexpr int kExitStatus1 = 1 << 8;  // a wait status

/// A job on two nodes of one worker each, which have joined.
class CoordinatorTest : public testing::Test {
 protected:
  struct Node {
    base::Channel channel;
    std::vector<Json> messages = {};
  };

  CoordinatorTest() {
    for (const int rank : {0, 1}) {
      Node& node = nodes_.emplace_back(Node{base::Channel(test::connect_to(port_))});
      node.channel.send(Handshake(Handshake::Side::kClient, "").begin());
      send_message(node.channel, as_json(Hello{.job = "none",
                                               .node = rank,
                                               .nodes = options_.nnodes.str(),
                                               .nproc = 1,
                                               .role = "default",
                                               .host = fmt::format("h{}", rank),
                                               .max_restarts = options_.max_restarts}));
    }
    next(0, "start");
    next(1, "start");
  }

  /// Lets the coordinator and the connections work.
  void work() {
    leader_.handle();
    for (Node& node : nodes_) {
      node.channel.flush();
      node.channel.receive();
      while (auto message = next_message(node.channel)) node.messages.push_back(*message);
    }
  }
  /// The next message of this type to a node; drops those before it.
  Json next(size_t node, const std::string& type) {
    std::vector<Json>& messages = nodes_[node].messages;
    const auto found = [&] { return std::ranges::find(messages, type, type_of); };
    EXPECT_TRUE(test::eventually(
        [&] {
          work();
          return found() != messages.end();
        },
        std::chrono::seconds(20)))
        << type;
    if (found() == messages.end()) return {};
    const Json message = *found();
    messages.erase(messages.begin(), found() + 1);
    return message;
  }
  static std::string type_of(const Json& message) { return message.at("type"); }
  void send(size_t node, const Json& message) { send_message(nodes_[node].channel, message); }

  /// The worker of node 1 fails, and both nodes end the attempt.
  void fail(int attempt, const std::string& what, uint64_t step) {
    send(1, as_json(Failed{{.attempt = attempt,
                            .rank = 1,
                            .status = kExitStatus1,
                            .step = step,
                            .exit_code = 1,
                            .may_restart = true,
                            .what = what}}));
    for (const size_t node : {0, 1}) {
      next(node, "stop");
      send(node, {{"type", "ended"}, {"attempt", attempt}});
    }
    for (const size_t node : {0, 1}) {
      const Json request = next(node, "ask_records");
      send(node, {{"type", "records"}, {"question", request.at("question")}});
    }
    // The attempt has ended.
    EXPECT_TRUE(test::eventually([&] {
      work();
      return leader_.take_records().has_value();
    }));
  }

  static LaunchOptions options() {
    LaunchOptions options;
    options.nnodes = {2, 2};
    options.max_restarts = 100;
    options.join_timeout = std::chrono::minutes(10);
    return options;
  }

  const LaunchOptions options_ = options();
  base::UniqueFd listener_ = listen_on(0, "127.0.0.1");
  const int port_ = base::bound_port(listener_.get());
  Coordinator leader_{options_, "id", port_, std::move(listener_)};
  std::deque<Node> nodes_;
};

TEST_F(CoordinatorTest, TheSameFailureWithAnotherTextIsTheSame) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    fail(attempt, fmt::format("rank 1 failed: exit code 1: port {} is in use", attempt), 7);
    if (attempt < 2) next(0, "start");
  }
  EXPECT_EQ(next(0, "finish").at("exit_code"), 1);
  EXPECT_THAT(leader_.take_notices(),
              ElementsAre("rank 1 failed (exit code 1) 3 times in a row at step 7: a restart does "
                          "not help"));
}

TEST_F(CoordinatorTest, ANodeThatIsLostBeforeARestartEndsAJobOfGivenNodes) {
  // After the third attempt that fails at once, the restart waits for a second.
  for (int attempt = 0; attempt < 3; ++attempt) {
    fail(attempt, "rank 1 failed", static_cast<uint64_t>(attempt));
    if (attempt < 2) next(0, "start");
  }
  nodes_.pop_back();
  const Json end = next(0, "finish");
  EXPECT_EQ(end.at("exit_code"), 75);
  EXPECT_EQ(end.at("what"), "the launcher of node 1 (h1) is gone");
}

TEST_F(CoordinatorTest, ANodeReportsOnlyItsOwnRanks) {
  const auto worker = [](int rank, const char* process) {
    return WorkerState{.rank = rank, .host = "h", .pid = 7, .process = process};
  };
  send(0, {{"type", "ask_status"}});
  next(1, "inquire");
  send(1, {{"type", "workers"},
           {"workers", std::vector{worker(0, "T"), worker(1, "R"), worker(2, "T")}}});
  next(0, "inquire");
  send(0, {{"type", "workers"}, {"workers", std::vector{worker(0, "S")}}});
  const Json status = next(0, "status");
  ASSERT_EQ(status.at("workers").size(), 2);
  EXPECT_EQ(status.at("workers").at(0).at("process"), "S");
  EXPECT_EQ(status.at("workers").at(1).at("process"), "R");
}

}  // namespace
}  // namespace syncbn::launch

// Node 0's coordinator with launchers that are connections of this process.
#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/held_port.h>

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

/// A job on two nodes of one worker each.
class CoordinatorTest : public testing::Test {
 protected:
  CoordinatorTest() {
    for (const int rank : {0, 1}) {
      base::Channel& node = nodes_.emplace_back(test::connect_to(port_));
      node.send(Handshake(Handshake::Side::kClient, "").begin());
      send(rank, Hello{.job = "none",
                       .node = rank,
                       .nodes = "2",
                       .nproc = 1,
                       .role = "default",
                       .host = fmt::format("h{}", rank)});
    }
  }

  /// The next message of this type to a node; drops those before it.
  template <class Message>
  Message next(size_t node) {
    Message found;
    EXPECT_TRUE(test::eventually(
        [&] {
          leader_.handle();
          nodes_[node].flush();
          nodes_[node].receive();
          while (const auto json = next_message(nodes_[node])) {
            const auto message = message_in<ToNode>(*json);
            const Message* const wanted = std::get_if<Message>(&message);
            if (wanted == nullptr) continue;
            found = *wanted;
            return true;
          }
          return false;
        },
        std::chrono::seconds(20)));
    return found;
  }
  void send(size_t node, const FromNode& message) {
    send_line(nodes_[node], message_line(message), nullptr);
  }

  static LaunchOptions options() {
    LaunchOptions options;
    options.nnodes = {2, 2};
    return options;
  }

  const LaunchOptions options_ = options();
  base::UniqueFd listener_ = listen_on(0, "127.0.0.1");
  const int port_ = base::bound_port(listener_.get());
  Coordinator leader_{options_, "id", port_, std::move(listener_)};
  std::deque<base::Channel> nodes_;
};

TEST_F(CoordinatorTest, CarriesMessagesBetweenTheLaunchersAndTheLeader) {
  for (const int node : {0, 1}) {
    const auto start = next<Start>(node);
    EXPECT_EQ(start.ranks.base, node);
    EXPECT_EQ(start.master_port, port_);
    EXPECT_EQ(start.job_id, "id");
  }
  send(1, Failed{{.attempt = 0,
                  .rank = 1,
                  .status = 7 << 8,
                  .step = 3,
                  .exit_code = 7,
                  .may_restart = true,
                  .what = "rank 1 failed"}});
  const JobFailure why = next<Stop>(0).why;
  EXPECT_EQ(why.what, "node 1 (h1): rank 1 failed");
  EXPECT_EQ(why.step, 3);
}

TEST_F(CoordinatorTest, AnUnknownMessageIsNamedOnceAndEndsTheConnection) {
  next<Start>(1);
  send_line(nodes_[1], R"({"type":"gossip"})", nullptr);
  send_line(nodes_[1], R"({"type":"gossip"})", nullptr);
  const std::string why = "node 0 does not understand a message of this launcher";
  EXPECT_EQ(next<Refuse>(1).message, why);
  EXPECT_THAT(leader_.take_notices(), ElementsAre("refused a launcher at 127.0.0.1: " + why));
  EXPECT_EQ(next<Stop>(0).why.what, "the launcher of node 1 (h1) is gone");
}

}  // namespace
}  // namespace syncbn::launch

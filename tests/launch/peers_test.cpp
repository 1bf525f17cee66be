#include "nodes/peers.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <syncbn/base/channel.h>
#include <syncbn/base/socket.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "common/descriptors.h"
#include "common/handshake.h"
#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using std::chrono::seconds;

class PeersTest : public testing::Test {
 protected:
  /// Connects a launcher to `peers_`.
  base::Channel connect() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    // Like the copy that a keeper holds while it starts workers.
    copy_ = base::UniqueFd(::dup(ends[0]));
    peers_.add_newcomer(base::Channel(base::UniqueFd(ends[0])));
    return base::Channel(base::UniqueFd(ends[1]));
  }
  base::Channel join(int node) {
    base::Channel channel = connect();
    channel.send(Handshake(Handshake::Side::kClient, "").begin());
    send_line(channel, message_line(FromNode(Hello{.node = node})), nullptr);
    channel.flush();
    peers_.handle([&](PeerLauncher& peer, const FromNode& message) {
      peer.rank = std::get<Hello>(message).node;
      peers_.register_node(peer);
    });
    return channel;
  }
  bool has_work() const { return base::poll_until(peers_.fd(), POLLIN, Clock::now()); }

  static constexpr seconds kSilence{5};
  Pipe other_ = Pipe::make();
  base::UniqueFd copy_;
  Peers peers_{Handshake(Handshake::Side::kServer, ""), kSilence, other_.reader.get()};
};

TEST_F(PeersTest, AConnectionThatAForkedProcessHasTooWakesNobodyAfterItsEnd) {
  { const base::Channel stranger = connect(); }
  EXPECT_TRUE(has_work());
  peers_.handle([](PeerLauncher& /*peer*/, const FromNode& /*message*/) {});
  EXPECT_FALSE(has_work());

  { const base::Channel launcher = join(1); }
  ASSERT_EQ(peers_.nodes().size(), 1);
  EXPECT_TRUE(has_work());
  peers_.handle([](PeerLauncher& /*peer*/, const FromNode& /*message*/) {});
  ASSERT_EQ(peers_.gone([](int) { return false; }).size(), 1);
  peers_.remove(1);
  EXPECT_FALSE(has_work());
}

TEST_F(PeersTest, WhatHasNoRoomIsLeftOutAndEndsNoConnection) {
  const base::Channel launcher = join(1);
  PeerLauncher& node = *peers_.nodes().at(1);
  const Waiting line{std::string(1 << 20, 'x')};
  int sent = 0;
  while (sent < 100 && peers_.send_if_room(node, line)) ++sent;
  EXPECT_GE(sent, 31);
  EXPECT_LT(sent, 100);
  peers_.send(node, Alive{});
  EXPECT_FALSE(node.channel.has_ended());
  EXPECT_GT(node.channel.unsent(), size_t{31} << 20);
}

TEST_F(PeersTest, TimeInWhichNodeZeroDoesOtherThingsIsNotSilence) {
  const base::Channel quiet = join(1);
  base::Channel busy = join(2);
  send_line(busy, message_line(FromNode(Alive{})), nullptr);
  busy.flush();
  int messages = 0;
  peers_.handle([&](PeerLauncher& /*peer*/, const FromNode& /*message*/) {
    ++messages;
    std::this_thread::sleep_for(kSilence + seconds(1));  // longer than the limit on silence
  });
  EXPECT_EQ(messages, 1);
  EXPECT_TRUE(peers_.gone([](int) { return false; }).empty());
}

}  // namespace
}  // namespace syncbn::launch

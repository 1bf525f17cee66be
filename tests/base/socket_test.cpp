#include <gmock/gmock.h>
#include <poll.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/store_greeting.h>

#include <vector>

#include "support/listener.h"

namespace syncbn::base {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::BoundPort;
using test::Listener;
using Clock = std::chrono::steady_clock;

void expect_host_port(const char* text, const char* host, std::optional<int> port) {
  const auto parsed = parse_host_port(text);
  ASSERT_TRUE(parsed) << text;
  EXPECT_EQ(parsed->host, host) << text;
  EXPECT_EQ(parsed->port, port) << text;
}

TEST(HostPortTest, IsWrittenWithAndWithoutAPort) {
  expect_host_port("node0", "node0", std::nullopt);
  expect_host_port("node0:29500", "node0", 29500);
  expect_host_port("10.0.0.1:0", "10.0.0.1", 0);
  expect_host_port("host:65535", "host", 65535);
}

TEST(HostPortTest, BracketsKeepAnIpv6AddressFromItsPort) {
  expect_host_port("[::1]:29500", "::1", 29500);
  expect_host_port("[::1]", "::1", std::nullopt);
  expect_host_port("fe80::1:2", "fe80::1:2", std::nullopt);
  expect_host_port("[fe80::1%eth0]:5", "fe80::1%eth0", 5);
}

TEST(HostPortTest, IsNothingElse) {
  for (const char* text : {"", ":1", "h:", "h:123abc", "h: 1", "h:-1", "h:+1", "h:65536", "h:1:2",
                           "[::1", "[::1]1", "[::1]:", "[h]:1", "[]:1", "::1]:1"}) {
    EXPECT_FALSE(parse_host_port(text)) << text;
  }
}

TEST(SocketTest, ANameThatIsNotKnownHasAReason) {
  std::string reason;
  EXPECT_FALSE(resolve("no.such.host.invalid", 1, reason));
  EXPECT_NE(reason, "");
}

/// A list of addresses, as a host name with several addresses gives.
class Addresses {
 public:
  explicit Addresses(const std::vector<int>& ports) {
    std::string reason;
    for (const int port : ports) parts_.push_back(resolve("127.0.0.1", port, reason));
    for (size_t i = 1; i < parts_.size(); ++i) parts_[i - 1]->ai_next = parts_[i].get();
  }
  ~Addresses() {
    for (const AddressList& part : parts_) part->ai_next = nullptr;
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  const addrinfo* list() const { return parts_.front().get(); }

 private:
  std::vector<AddressList> parts_;
};

/// Drops packets, because its queue is full of connections that no process accepts.
class BlackHole {
 public:
  BlackHole() {
    ::listen(bound_.fd.get(), 0);
    std::string reason;
    const Addresses own({bound_.port});
    for (;;) {
      UniqueFd one = connect_to_any(own.list(), Clock::now() + milliseconds(500), reason);
      if (!one) return;
      queued_.push_back(std::move(one));
    }
  }
  int port() const { return bound_.port; }

 private:
  BoundPort bound_;
  std::vector<UniqueFd> queued_;
};

int peer_port(const UniqueFd& fd) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

TEST(SocketTest, GoesOnFromAnAddressThatRefuses) {
  const BoundPort refusing;
  const Listener answering;
  const Addresses both({refusing.port, answering.port});
  std::string reason;
  EXPECT_EQ(peer_port(connect_to_any(both.list(), Clock::now() + seconds(50), reason)),
            answering.port);
}

TEST(SocketTest, GoesOnFromAnAddressThatSwallowsPackets) {
  const BlackHole hole;
  const Listener answering;
  const Addresses both({hole.port(), answering.port});
  std::string reason;
  const UniqueFd fd = connect_to_any(both.list(), Clock::now() + seconds(300), reason);
  EXPECT_EQ(peer_port(fd), answering.port);
}

TEST(SocketTest, SaysWhyNoAddressAnswers) {
  const BlackHole hole;
  const Addresses only({hole.port()});
  std::string reason;
  EXPECT_FALSE(connect_to_any(only.list(), Clock::now() + milliseconds(50), reason));
  EXPECT_EQ(reason, "Connection timed out");
  const BoundPort refusing;
  EXPECT_FALSE(connect_to_any(Addresses({refusing.port}).list(), Clock::now(), reason));
  EXPECT_EQ(reason, "Connection refused");
}

TEST(SocketTest, TakesTheFirstConnectionThatIsUsable) {
  const Listener first;
  const Listener second;
  const Addresses both({first.port, second.port});
  std::string reason;
  int looked_at = 0;
  const UniqueFd fd = connect_to_any(both.list(), Clock::now() + seconds(50), reason,
                                     [&](int, Deadline) { return ++looked_at == 2; });
  EXPECT_EQ(peer_port(fd), second.port);
}

TEST(SocketTest, EachAddressHasItsShareOfTheTimeAndTheLastOneMost) {
  const Deadline now = Clock::now();
  EXPECT_EQ(deadline_of_first(now, now + seconds(3), 3), now + seconds(1));
  EXPECT_EQ(deadline_of_first(now, now + seconds(6), 1), now + seconds(6));
  EXPECT_EQ(deadline_of_first(now, now + seconds(300), 2), now + seconds(2));
  EXPECT_EQ(deadline_of_first(now, now + seconds(300), 1), now + seconds(10));
}

TEST(StoreGreetingTest, IsTorchsMagicNumberAndAPing) {
  EXPECT_EQ(store_greeting(0x04030201), std::string("\0\xce\xf7\x85\x3c\x0d\1\2\3\4", 10));
}

}  // namespace
}  // namespace syncbn::base

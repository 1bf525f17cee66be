// The connections over which ranks talk outside of collectives.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "support/connection.h"
#include "support/listener.h"
#include "watch_link.h"

namespace {

using syncbn::base::UniqueFd;
using syncbn::dist::detail::WatchLink;
using ::testing::Each;

struct TwoLinks {
  TwoLinks() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) syncbn::base::throw_errno("socketpair");
    sender = WatchLink(UniqueFd(ends[0]));
    receiver = WatchLink(UniqueFd(ends[1]));
  }
  WatchLink sender{UniqueFd()};
  WatchLink receiver{UniqueFd()};
};

// A thousand ranks speak at the same time.
TEST(WatchLinkTest, ManyLinesAtOnceArrive) {
  constexpr size_t kLines = 20'000;
  std::string text;
  for (size_t line = 0; line < kLines; ++line) text += "some line\n";
  TwoLinks links;
  std::vector<std::string> lines;
  links.sender.send(text);
  while (lines.size() < kLines) {
    const size_t before = lines.size();
    ASSERT_TRUE(links.receiver.receive(lines)) << "after " << lines.size() << " lines";
    ASSERT_GT(lines.size(), before);
    links.sender.flush();
  }
  EXPECT_EQ(lines.size(), kLines);
  EXPECT_THAT(lines, Each("some line"));
}

TEST(WatchLinkTest, ALineWithoutAnEndEndsTheConnection) {
  TwoLinks links;
  std::vector<std::string> lines;
  links.sender.send("a line\n" + std::string(100'000, 'x'));
  EXPECT_FALSE(links.receiver.receive(lines));
  EXPECT_EQ(lines, std::vector<std::string>{"a line"});
}

// Linux sends no keepalive probes while something that was sent is not acknowledged.
TEST(WatchLinkTest, AHostThatIsGoneIsGivenUpAfterElevenSeconds) {
  const syncbn::test::Listener listener;
  const WatchLink link(syncbn::test::connect_to(listener.port));
  const auto option = [&](int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    EXPECT_EQ(::getsockopt(link.fd(), IPPROTO_TCP, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(TCP_USER_TIMEOUT), 11'000);
  EXPECT_EQ(option(TCP_KEEPIDLE) + option(TCP_KEEPCNT) * option(TCP_KEEPINTVL), 11);
}

}  // namespace

// The connection between a node and its head.
#include "common/head_link.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common/descriptors.h"

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;

struct Head {
  explicit Head(milliseconds silence = HeadLink::kSilence) {
    Pipe pipe = Pipe::make();
    writer = std::move(pipe.writer);
    link.emplace(std::move(pipe.reader), silence);
  }
  void says(const std::string& text) const {
    ASSERT_EQ(::write(writer.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  bool link_has_news(milliseconds within) {
    return base::poll_until(link->fd(), POLLIN, std::chrono::steady_clock::now() + within);
  }

  base::UniqueFd writer;
  std::optional<HeadLink> link;
};

TEST(HeadLinkTest, GivesMessagesAndSignalsInTheirOrder) {
  Head head;
  head.says("{\"type\":\"alive\"}\n{\"type\":\"go\",\"master_port\":7}\n");
  EXPECT_EQ(head.link->wait_for("go").at("master_port"), 7);
  EXPECT_EQ(head.link->next_signal(), std::nullopt);
  // The second message arrives in two parts.
  head.says("{\"type\":\"signal\",\"signal\":10}\n{\"type\":\"sig");
  EXPECT_EQ(head.link->next_signal(), 10);
  EXPECT_EQ(head.link->next_signal(), std::nullopt);
  head.says("nal\",\"signal\":2}\n");
  EXPECT_EQ(head.link->next_signal(), 2);
}

TEST(HeadLinkTest, WhatCameBeforeTheEndIsThere) {
  Head head;
  head.says("{\"type\":\"signal\",\"signal\":15}\n");
  head.writer.reset();
  EXPECT_EQ(head.link->next_signal(), 15);
  EXPECT_THROW(head.link->next_signal(), base::UnavailableError);
  EXPECT_THROW(head.link->wait_for("go"), base::UnavailableError);
}

TEST(HeadLinkTest, SilenceIsTheEnd) {
  Head head(milliseconds(50));
  EXPECT_TRUE(head.link_has_news(std::chrono::seconds(20)));
  EXPECT_THROW(head.link->next_signal(), base::UnavailableError);
}

TEST(HeadLinkTest, AHeadThatIsStoppedMayBeSilent) {
  Head head(milliseconds(50));
  head.says("{\"type\":\"signal\",\"signal\":19}\n");
  ASSERT_EQ(head.link->next_signal(), SIGSTOP);
  EXPECT_FALSE(head.link_has_news(milliseconds(200)));
  EXPECT_EQ(head.link->next_signal(), std::nullopt);
  // After SIGCONT, silence counts again.
  head.says("{\"type\":\"signal\",\"signal\":18}\n");
  ASSERT_EQ(head.link->next_signal(), SIGCONT);
  EXPECT_TRUE(head.link_has_news(std::chrono::seconds(20)));
  EXPECT_THROW(head.link->next_signal(), base::UnavailableError);
}

TEST(HeadLinkTest, WhatIsNoMessageIsRefused) {
  Head head;
  head.says("Welcome!\n");
  EXPECT_THROW(head.link->next_signal(), base::UnavailableError);
}

}  // namespace
}  // namespace syncbn::launch

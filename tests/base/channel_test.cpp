#include <gmock/gmock.h>
#include <poll.h>
#include <syncbn/base/channel.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>

namespace syncbn::base {
namespace {

struct TwoEnds {
  explicit TwoEnds(size_t max_unsent = Channel::kMaxUnsent) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    sender = Channel(UniqueFd(ends[0]), max_unsent);
    receiver = Channel(UniqueFd(ends[1]));
  }
  Channel sender;
  Channel receiver;
};

bool is_ready(const Channel& channel) {
  pollfd ready{channel.fd(), POLLIN, 0};
  return ::poll(&ready, 1, 0) > 0;
}

// As many lines as a thousand ranks send at the same time.
TEST(ChannelTest, ManyLinesAtOnceArrive) {
  constexpr size_t kLines = 20'000;
  std::string text;
  for (size_t line = 0; line < kLines; ++line) text += "some line\n";
  TwoEnds ends;
  ends.sender.send(text);
  for (size_t lines = 0; lines < kLines;) {
    const size_t before = lines;
    ends.receiver.receive();
    ASSERT_FALSE(ends.receiver.has_ended()) << "after " << lines << " lines";
    for (; const auto line = ends.receiver.next_line(); ++lines) EXPECT_EQ(*line, "some line");
    ASSERT_GT(lines, before);
    ends.sender.flush();
  }
  EXPECT_EQ(ends.receiver.input(), "");
}

TEST(ChannelTest, ALineMayArriveInPieces) {
  TwoEnds ends;
  ends.sender.send("half");
  ends.receiver.receive();
  EXPECT_EQ(ends.receiver.next_line(), std::nullopt);
  ends.sender.send(" whole\n\nrest");
  ends.receiver.receive();
  EXPECT_EQ(ends.receiver.next_line(), "half whole");
  EXPECT_EQ(ends.receiver.next_line(), "");
  EXPECT_EQ(ends.receiver.next_line(), std::nullopt);
  EXPECT_EQ(ends.receiver.input(), "rest");
}

TEST(ChannelTest, ALineWithoutAnEndEndsTheConnection) {
  TwoEnds ends;
  ends.sender.send(std::string(100'000, 'x'));
  ends.receiver.receive();
  EXPECT_EQ(ends.receiver.next_line(50'000), std::nullopt);
  EXPECT_TRUE(ends.receiver.has_ended());
  EXPECT_EQ(ends.receiver.error(), EMSGSIZE);
}

TEST(ChannelTest, APeerThatDoesNotReadEndsTheConnection) {
  TwoEnds ends(1'000'000);
  ends.receiver.send("last words\n");
  const std::string piece(1000, 'x');
  for (int i = 0; i < 10'000; ++i) {
    ends.sender.send(piece);
    ASSERT_LE(ends.sender.unsent(), 1'000'000U);
  }
  EXPECT_EQ(ends.sender.error(), ENOBUFS);
  EXPECT_EQ(ends.sender.unsent(), 0U);
  EXPECT_TRUE(is_ready(ends.sender));
  ends.sender.receive();
  EXPECT_EQ(ends.sender.next_line(), "last words");
  ends.sender.receive();
  EXPECT_TRUE(ends.sender.has_ended());
  EXPECT_EQ(ends.sender.error(), ENOBUFS);
}

TEST(ChannelTest, WhatWasSentBeforeTheEndIsThere) {
  TwoEnds ends;
  ends.sender.send("last words\n");
  ends.sender.close();
  while (!ends.receiver.has_ended()) ends.receiver.receive();
  EXPECT_EQ(ends.receiver.error(), 0);
  EXPECT_EQ(ends.receiver.next_line(), "last words");
  ends.receiver.send("nobody reads this");
  EXPECT_EQ(ends.receiver.unsent(), 0U);
}

TEST(ChannelTest, WritesToAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Channel reader{UniqueFd(ends[0])};
  Channel writer{UniqueFd(ends[1])};
  writer.send("some line\n");
  reader.receive();
  EXPECT_EQ(reader.next_line(), "some line");
  writer.send(std::string(100'000, 'x'));
  EXPECT_GT(writer.unsent(), 0U);
  for (size_t size = 0; size < 100'000; size = reader.input().size()) {
    writer.flush();
    reader.receive();
  }
  EXPECT_EQ(writer.unsent(), 0U);
}

TEST(ByteQueueTest, GivesBackMemoryEvenIfItNeverRunsEmpty) {
  ByteQueue queue;
  const std::string piece(1000, 'x');
  queue.append(piece);
  for (int i = 0; i < 10'000; ++i) {
    queue.append(piece);
    queue.consume(piece.size());
    ASSERT_EQ(queue.size(), piece.size());
  }
  EXPECT_LT(queue.capacity(), 1U << 20);
}

}  // namespace
}  // namespace syncbn::base

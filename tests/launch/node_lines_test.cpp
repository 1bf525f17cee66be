// How a head handles the stderr of its nodes.
#include "ssh/node_protocol.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "output/output.h"

namespace syncbn::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Read {
  explicit Read(const std::vector<std::string>& pieces) {
    NodeLines reader("MARK");
    const NodeLines::Sinks sinks{
        .line = [this](std::string_view line) { lines.emplace_back(line); },
        .message = [this](std::string_view message) { messages.emplace_back(message); }};
    for (const std::string& piece : pieces) reader.feed(piece, sinks);
    reader.finish(sinks);
  }

  std::vector<std::string> lines;
  std::vector<std::string> messages;
};

TEST(NodeLinesTest, TellsMessagesFromLines) {
  const Read read({"one\n\nMA", "RK {1}\nhalf a lineMARK {2", "}\ntwo\nrest"});
  EXPECT_THAT(read.lines, ElementsAre("one", "", "half a line", "two", "rest"));
  EXPECT_THAT(read.messages, ElementsAre(" {1}", " {2}"));
}

TEST(NodeLinesTest, AMessageMayBeLongerThanAnyLine) {
  const std::string words(3 * LineSplitter::kLongest, 'x');
  const Read read(
      {"MARK", words.substr(0, words.size() / 2), words.substr(words.size() / 2), "\n"});
  EXPECT_TRUE(read.messages == std::vector{words});  // not printed
  EXPECT_THAT(read.lines, IsEmpty());
}

TEST(NodeLinesTest, ALineThatNeverEndsIsCutButNeverInAMark) {
  const std::string words(LineSplitter::kLongest, 'x');
  const Read read({words + "MA", "RK {}\n", words, words, "y"});
  EXPECT_THAT(read.messages, ElementsAre(" {}"));
  std::string lines;
  for (const std::string& line : read.lines) {
    EXPECT_LE(line.size(), 2 * words.size());
    lines += line;
  }
  EXPECT_TRUE(lines == words + words + words + "y");
}

TEST(NodeLinesTest, AMessageThatNeverEndsIsCut) {
  const std::string megabyte(1 << 20, 'x');
  const std::vector<std::string> pieces((NodeLines::kLongestMessage >> 20) + 1, megabyte);
  std::vector<std::string> marked{"MARK"};
  marked.insert(marked.end(), pieces.begin(), pieces.end());
  const Read read(marked);
  ASSERT_EQ(read.messages.size(), 1U);
  EXPECT_EQ(read.messages[0].size(), NodeLines::kLongestMessage);
}

TEST(NodeLinesTest, HalfAMessageAtTheEndIsNone) {
  const Read read({"wordsMARK {\"type\":"});
  EXPECT_THAT(read.lines, ElementsAre("words"));
  EXPECT_THAT(read.messages, IsEmpty());
}

}  // namespace
}  // namespace syncbn::launch

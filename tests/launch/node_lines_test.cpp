// How a head handles the stderr of its nodes.
#include "ssh/node_protocol.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
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

TEST(NodeMessageTest, WhatMakesNoSenseIsNone) {
  // nlohmann's functions that copy or print it would recurse until the stack overflows.
  const std::string deep = std::string(500'000, '[') + std::string(500'000, ']');
  const std::string ended = R"({"type":"ended","exit_code":1,"report":)";
  EXPECT_FALSE(parse_node_message(ended + deep + "}"));
  EXPECT_FALSE(parse_node_message(ended + R"("{\"failure\":)" + deep + "}\"}"));
  for (const char* text :
       {"", "hello", "[]", "{", "{}", R"({"type":1})", R"({"type":"hello"})", R"({"type":"ready"})",
        R"({"type":"ready","master_port":"x"})", R"({"type":"problem","what":"x"})",
        R"({"type":"problem","exit_code":0,"what":"x"})", R"({"type":"problem","exit_code":2})",
        R"({"type":"ended"})", R"({"type":"ended","exit_code":256,"report":"{\"failure\":null}"})",
        R"({"type":"ended","exit_code":"0","report":"{\"failure\":null}"})",
        R"({"type":"ended","exit_code":0,"report":"{"})",
        R"({"type":"ended","exit_code":0,"report":"{}"})"}) {
    EXPECT_FALSE(parse_node_message(text)) << text;
  }
  EXPECT_TRUE(
      parse_node_message(R"({"type":"ended","exit_code":0,"report":"{\"failure\":null}"})"));
}

TEST(NodeJobTest, WhatIsNoneIsRefused) {
  const nlohmann::json good = NodeJob{.version = SYNCBN_VERSION, .mark = "MARK"}.to_json();
  EXPECT_EQ(NodeJob::from_json(good).mark, "MARK");
  for (const nlohmann::json& job :
       {nlohmann::json(), nlohmann::json("x"), nlohmann::json::array({1, 2}),
        nlohmann::json(nlohmann::json::to_msgpack({{"words", 1}}))}) {
    nlohmann::json message = good;
    message["job"] = job;
    EXPECT_THROW(NodeJob::from_json(message), nlohmann::json::exception) << job;
  }
}

TEST(NodeJobTest, AnyBytesArriveAsTheyWere) {
  std::string bytes;
  for (int byte = 1; byte < 256; ++byte) bytes += static_cast<char>(byte);
  NodeJob job{.version = SYNCBN_VERSION, .mark = "mark", .folder = bytes};
  job.environment["NAME" + bytes] = bytes;
  job.words = {"a", bytes, "", "\n"};
  job.colours.err = true;
  const NodeJob read = NodeJob::from_json(nlohmann::json::parse(job.to_json().dump()));
  EXPECT_EQ(read.folder, bytes);
  EXPECT_EQ(read.environment, job.environment);
  EXPECT_EQ(read.words, job.words);
  EXPECT_FALSE(read.colours.out);
  EXPECT_TRUE(read.colours.err);
}

}  // namespace
}  // namespace syncbn::launch

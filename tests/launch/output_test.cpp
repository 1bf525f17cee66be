#include "output/output.h"

#include <gmock/gmock.h>
#include <syncbn/base/env.h>

#include <string>
#include <thread>
#include <vector>

namespace syncbn::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

std::vector<std::string> lines_of(const std::vector<std::string>& pieces) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  const auto sink = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& piece : pieces) splitter.feed(piece, sink);
  splitter.finish(sink);
  return lines;
}

TEST(LineSplitterTest, JoinsPiecesAndKeepsEmptyLines) {
  EXPECT_THAT(lines_of({"on", "e\n\ntw", "o\n"}), ElementsAre("one", "", "two"));
}

TEST(LineSplitterTest, GivesTheLastLineWithoutNewline) {
  EXPECT_THAT(lines_of({"a\nb"}), ElementsAre("a", "b"));
  EXPECT_THAT(lines_of({"a\n"}), ElementsAre("a"));
  EXPECT_THAT(lines_of({}), ElementsAre());
}

TEST(LineSplitterTest, CutsALineThatNeverEnds) {
  const std::string megabyte(LineSplitter::kLongest, 'x');
  EXPECT_THAT(lines_of({megabyte, "y", "z"}), ElementsAre(SizeIs(megabyte.size() + 1), "z"));
}

TEST(LinePrefixTest, NamesHostRankAndRole) {
  LaunchOptions options;
  options.prefix = "[${host}:${rank}] ";
  const std::string host = base::hostname();
  EXPECT_EQ(line_prefix(options, 5, 1), "[" + host.substr(0, host.find('.')) + ":5] ");
  options.prefix = "<${role_name}${local_rank}/${rank}/${rank}>";
  options.role = "trainer";
  EXPECT_EQ(line_prefix(options, 5, 1), "<trainer1/5/5>");
}

TEST(OutputTest, PrefixesEachLineWithItsRankOnItsOwnStream) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  {
    Output output({});
    output.begin_attempt({{.rank = 4, .prefix = "[4] "}, {.rank = 5, .prefix = "${time} "}});
    output.write(0, Stream::kOut, "hel");
    output.write(1, Stream::kOut, "other\n");
    output.write(0, Stream::kOut, "lo\nrest");
    output.write(1, Stream::kErr, "bad\n");
    output.finish(0, Stream::kOut);
  }
  const std::string time = "[0-9][0-9]:[0-9][0-9]:[0-9][0-9] ";
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              MatchesRegex(time + "other\n.4. hello\n.4. rest\n"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), MatchesRegex(time + "bad\n"));
}

TEST(OutputTest, KeepsLinesWholeWithoutPrefix) {
  ::testing::internal::CaptureStdout();
  {
    Output output({});
    output.begin_attempt({{.rank = 0}, {.rank = 1}});
    output.write(0, Stream::kOut, "on");
    output.write(1, Stream::kOut, "other\n");
    output.write(0, Stream::kOut, "e\nlast");
    output.finish(0, Stream::kOut);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "other\none\nlast\n");
}

TEST(OutputTest, PassesProgressAndPromptsOfSeveralWorkersWithoutPrefix) {
  ::testing::internal::CaptureStdout();
  {
    Output output({});
    output.begin_attempt({{.rank = 0}, {.rank = 1}});
    output.write(0, Stream::kOut, "10 %\r20 %");
    output.write(1, Stream::kOut, "other\n");
    ASSERT_TRUE(output.due());
    std::this_thread::sleep_until(*output.due());  // before, no partial line is shown
    output.show_partial_lines();
    output.write(1, Stream::kOut, "second\n");
    output.write(0, Stream::kOut, "\r30 %\n");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "10 %\rother\n20 %second\n\r30 %\n");
}

TEST(OutputTest, ShowsOneLinePerRankOfProgressOnATerminal) {
  ::testing::internal::CaptureStderr();
  {
    Output output({.err = {.is_terminal = true}});
    output.begin_attempt({{.rank = 0, .prefix = "[0] "}, {.rank = 1, .prefix = "[1] "}});
    output.write(0, Stream::kErr, "\r10 %\r\x1b[31m20 %");
    output.write(1, Stream::kErr, "30 %\r");
    std::this_thread::sleep_until(output.due().value());  // before, no partial line is shown
    output.show_partial_lines();
    output.write(1, Stream::kErr, "done\n");
    output.clear_live();
    output.write(0, Stream::kErr, "\r100 %\n");
    EXPECT_EQ(output.tail(0), std::vector<std::string>{"100 %"});
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "[0] 20 %\n[1] 30 %"
            "\r\x1b[K\x1b[A\x1b[K[1] done\n[0] 20 %"
            "\r\x1b[K[0] 100 %\n");
}

TEST(OutputTest, PassesBytesUnchangedForAWorkerAlone) {
  ::testing::internal::CaptureStdout();
  {
    Output output({});
    output.begin_attempt({{.whole_lines = false}});
    output.write(0, Stream::kOut, "10 %\r20 %");
    output.finish(0, Stream::kOut);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "10 %\r20 %");
}

TEST(OutputTest, KeepsTheLastLinesOfStderr) {
  ::testing::internal::CaptureStderr();
  Output output({});
  output.begin_attempt({{.rank = 0, .prefix = "[0] "}, {.rank = 1, .prefix = "[1] "}});
  for (int i = 0; i < 30; ++i) output.write(0, Stream::kErr, "line " + std::to_string(i) + "\n");
  EXPECT_THAT(output.tail(0), SizeIs(Output::kTailLines));
  EXPECT_EQ(output.tail(0).front(), "line 10");
  EXPECT_EQ(output.tail(0).back(), "line 29");
  EXPECT_THAT(output.tail(1), SizeIs(0));
  ::testing::internal::GetCapturedStderr();
}

TEST(OutputTest, KnowsWhetherTheTailIsTheLastThingPrinted) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Output output({});
  output.begin_attempt({{.rank = 0, .prefix = "[0] "}, {.rank = 1, .prefix = "[1] "}});
  EXPECT_FALSE(output.tail_is_last(0));
  output.write(1, Stream::kOut, "before\n");
  output.write(0, Stream::kErr, "a\nb\n");
  EXPECT_TRUE(output.tail_is_last(0));
  output.write(1, Stream::kOut, "between\n");
  output.write(0, Stream::kErr, "c\n");
  EXPECT_FALSE(output.tail_is_last(0));
  ::testing::internal::GetCapturedStdout();
  ::testing::internal::GetCapturedStderr();
}

TEST(OutputTest, ErasesAndRedrawsTheBarAroundLines) {
  ::testing::internal::CaptureStderr();
  {
    Output output({.err = {.is_terminal = true}});
    output.begin_attempt({{.whole_lines = false}});
    output.set_bar("BAR");
    output.write(0, Stream::kErr, "line\n");
    output.write(0, Stream::kErr, "half");  // no bar after an unfinished line
    output.write(0, Stream::kErr, " whole\n");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "BAR\r\x1b[Kline\nBAR\r\x1b[Khalf whole\nBAR\r\x1b[K");
}

TEST(OutputTest, DrawsNoBarWithoutATerminal) {
  ::testing::internal::CaptureStderr();
  {
    Output output({});
    output.begin_attempt({{.rank = 0, .prefix = "[0] "}});
    output.set_bar("BAR");
    output.say("message");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "message\n");
}

}  // namespace
}  // namespace syncbn::launch

#include "workers/agent_reader.h"

#include <gmock/gmock.h>

#include <cstring>
#include <vector>

namespace syncbn::launch {
namespace {

using ::testing::ElementsAre;

syncbn_agent_record record(uint64_t done, const char* text = "") {
  syncbn_agent_record result{};
  result.magic = SYNCBN_AGENT_MAGIC;
  result.version = SYNCBN_AGENT_VERSION;
  result.kind = SYNCBN_AGENT_PROGRESS;
  result.done = done;
  std::strncpy(result.text, text, sizeof(result.text) - 1);
  return result;
}

std::string bytes(const syncbn_agent_record& record) {
  return {reinterpret_cast<const char*>(&record), sizeof(record)};
}

std::vector<uint64_t> read_in_pieces(const std::string& stream, size_t piece) {
  AgentReader reader;
  std::vector<uint64_t> done;
  for (size_t at = 0; at < stream.size(); at += piece) {
    reader.feed(std::string_view(stream).substr(at, piece),
                [&](const syncbn_agent_record& got) { done.push_back(got.done); });
  }
  return done;
}

TEST(AgentReaderTest, ReadsRecordsHoweverTheyAreCut) {
  const std::string stream = bytes(record(1)) + bytes(record(2)) + bytes(record(3));
  for (const size_t piece : {1, 7, 255, 256, 257, 1000}) {
    EXPECT_THAT(read_in_pieces(stream, piece), ElementsAre(1, 2, 3)) << piece;
  }
}

TEST(AgentReaderTest, FindsRecordsBetweenGarbageOfAnyLength) {
  for (const size_t length : {1, 3, 255, 256, 300, 5000}) {
    const std::string garbage(length, 'S');  // the first byte of the magic number
    std::string stream;
    for (const int step : {7, 8}) stream.append(garbage).append(bytes(record(step)));
    EXPECT_THAT(read_in_pieces(stream, 100), ElementsAre(7, 8)) << length;
  }
}

TEST(AgentReaderTest, SkipsRecordsOfAnotherVersion) {
  syncbn_agent_record later = record(1);
  later.version = SYNCBN_AGENT_VERSION + 1;
  EXPECT_THAT(read_in_pieces(bytes(later) + bytes(record(2)), 64), ElementsAre(2));
}

TEST(AgentReaderTest, MakesTextSafeForATerminal) {
  syncbn_agent_record wild = record(1, "\x1b[2Jred\n");
  std::memset(wild.text + 10, 'x', sizeof(wild.text) - 10);  // without a NUL
  AgentReader reader;
  std::string text;
  reader.feed(bytes(wild), [&](const syncbn_agent_record& got) { text = got.text; });
  EXPECT_EQ(text, R"(\x1b[2Jred )");
}

TEST(AgentReaderTest, KeepsTheBytesOfALogsPathAndDropsACommandThatItCannotShow) {
  std::vector<std::string> texts;
  for (const auto kind : {SYNCBN_AGENT_LOG, SYNCBN_AGENT_RESUME}) {
    syncbn_agent_record odd = record(1, "runs/caf\xe9\tnew");
    odd.kind = static_cast<uint16_t>(kind);
    AgentReader().feed(bytes(odd),
                       [&](const syncbn_agent_record& got) { texts.emplace_back(got.text); });
  }
  EXPECT_THAT(texts, ElementsAre("runs/caf\xe9\tnew"));
}

}  // namespace
}  // namespace syncbn::launch

// Flight records, from the memory that a rank writes to the file and its explanation.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/flight_record.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "job/explain.h"
#include "job/flight_file.h"
#include "job/rank_record.h"
#include "job/worker_state.h"
#include "support/temp_folder.h"

namespace syncbn::test {
namespace {

using base::FlightLayout;
using base::FlightRecord;
using launch::FlightFile;
using launch::RankMemory;
using launch::RankRecord;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::ThrowsMessage;

/// One of three ranks, with a record as a program of lib/dist writes it.
struct Rank {
  explicit Rank(int rank) : record(FlightRecord::make(memory.fd(), rank, 3)) {
    record->add_group("all", {0, 1, 2});
    record->add_group("pair", {0, 1});
  }

  uint64_t begin(uint64_t sequence, size_t group, const std::string& name = "all_reduce") {
    const std::array<int64_t, 2> sizes{2, 3};
    return record->begin({.kind = "all_reduce",
                          .dtype = "Float",
                          .name = name,
                          .sequence = sequence,
                          .group = group,
                          .sizes = sizes.data(),
                          .dimensions = sizes.size()});
  }
  void call(uint64_t sequence, size_t group) {
    record->end(begin(sequence, group), FlightLayout::kSucceeded, /*was_awaited=*/false);
  }

  RankMemory memory = RankMemory::make();
  std::shared_ptr<FlightRecord> record;
};

/// A record with more calls than a rank of a large job may send.
RankRecord stuck_rank() {
  Rank rank(0);
  for (uint64_t n = 1; n <= 50; ++n) rank.call(n, 0);
  rank.begin(51, 0);
  return *rank.memory.read();
}

TEST(FlightRecordTest, TheLauncherReadsTheLatestCallsOfARank) {
  Rank rank(1);
  for (uint64_t n = 1; n <= FlightLayout::kCalls + 200; ++n) rank.call(n, 0);
  rank.record->remove(rank.begin(1, 1));
  rank.begin(1, 1, "SyncBatchNorm layer 'bn1'");
  const auto counts = rank.memory.counts();
  EXPECT_EQ(counts->started - counts->ended, 1);
  const auto record = rank.memory.read();
  EXPECT_EQ(record->rank, 1);
  EXPECT_EQ(record->world_size, 3);
  EXPECT_EQ(record->pid, ::getpid());
  EXPECT_EQ(record->groups[1].name, "pair");
  EXPECT_EQ(record->groups[1].ranks, (launch::RankRuns{{0, 2, 1}}));
  ASSERT_EQ(record->calls.size(), FlightLayout::kCalls - 1) << "one was removed";
  EXPECT_EQ(record->calls.front().sequence, 203);
  const RankRecord::Call& last = record->calls.back();
  EXPECT_EQ(record->name_of(last), "SyncBatchNorm layer 'bn1' #1 of group 'pair'");
  EXPECT_EQ(last.describe(), "SyncBatchNorm layer 'bn1' of Float [2, 3]");
  EXPECT_EQ(last.state, FlightLayout::kPending);
  EXPECT_EQ(last.end, 0);
}

TEST(FlightRecordTest, ARecordOutlivesItsProcessUntilAnotherTakesIt) {
  RankMemory memory = RankMemory::make();
  EXPECT_FALSE(memory.counts());
  const pid_t child = ::fork();
  if (child == 0) {
    const auto record = FlightRecord::make(memory.fd(), 2, 3);
    record->add_group("all", {0, 1, 2});
    record->begin({.kind = "barrier", .dtype = "", .name = "barrier", .sequence = 7});
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(memory.read()->calls.at(0).sequence, 7);
  EXPECT_EQ(memory.read()->pid, child);
  EXPECT_FALSE(memory.counts()) << "nobody waits in the call";
  // A second program takes over the memory, like b in `sh -c 'a || b'`.
  const auto record = FlightRecord::make(memory.fd(), 1, 3);
  ASSERT_TRUE(record);
  EXPECT_FALSE(FlightRecord::make(memory.fd(), 0, 3));
  EXPECT_EQ(memory.counts()->started, 0);
  EXPECT_EQ(memory.read()->rank, 1);
  EXPECT_THAT(memory.read()->groups, IsEmpty());
  EXPECT_THAT(memory.read()->calls, IsEmpty());
}

TEST(FlightRecordTest, TheLastCallOfAGroupIsKnownWhenTheRingHasLostIt) {
  Rank rank(1);
  rank.call(5, 1);
  rank.record->remove(rank.begin(6, 1));
  for (uint64_t n = 1; n <= FlightLayout::kCalls; ++n) rank.call(n, 0);
  launch::WorkerState worker;
  launch::describe_calls(*rank.memory.read(), worker);
  EXPECT_THAT(worker.called, ElementsAre(Pair("all", FlightLayout::kCalls), Pair("pair", 5)));
}

TEST(FlightRecordTest, TimeInWhichNoThreadWaitsIsAddedUp) {
  const auto begin = std::chrono::steady_clock::now();
  Rank rank(0);
  const uint64_t asynchronous = rank.begin(1, 0);
  ::usleep(50'000);  // no thread waits: this time counts
  const uint64_t blocking = rank.begin(2, 0);
  rank.record->await(blocking);
  ::usleep(200'000);  // a thread waits: this time does not
  rank.record->end(asynchronous, FlightLayout::kSucceeded, /*was_awaited=*/false);
  rank.record->end(blocking, FlightLayout::kFailed, /*was_awaited=*/true);
  const double own = rank.memory.counts()->own_seconds;
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(own, 0.05);
  EXPECT_LE(own, all.count() - 0.2);
}

TEST(FlightRecordTest, AFileThatIsNoRecordIsNotWrittenTo) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  EXPECT_FALSE(FlightRecord::make(pipe[1], 0, 1));
  EXPECT_FALSE(FlightRecord::make(-1, 0, 1));
  EXPECT_FALSE(launch::read_rank_record(pipe[0]));
}

TEST(RecordMessageTest, ARecordSurvivesItsJourney) {
  Rank rank(1);
  rank.record->add_group("odd", {1, 3, 5, 7, 8, 2});
  rank.call(1, 0);
  rank.call(1, 1);
  rank.begin(2, 0, "SyncBatchNorm layer 'bn1'");
  RankRecord sent = *rank.memory.read();
  ASSERT_TRUE(launch::shorten(sent, launch::RecordQuota::of(3)));
  const RankRecord got = nlohmann::json::parse(nlohmann::json(sent).dump());
  // The text also contains the groups, the times and the host.
  const auto text = [](const RankRecord& record) {
    return FlightFile{.job = "j", .unix_ns = 1, .records = {{1, record}}}.text();
  };
  EXPECT_EQ(text(got), text(sent));
}

TEST(RecordMessageTest, AMessageAboveItsShareHasTheLatestCallsAndThoseThatAreOpen) {
  Rank rank(0);
  rank.begin(1, 1);
  const uint64_t calls = FlightLayout::kCalls - 1;
  for (uint64_t n = 1; n <= calls; ++n) {
    rank.record->end(rank.begin(n, 0, fmt::format("{:0>100}", n)), FlightLayout::kSucceeded,
                     /*was_awaited=*/false);
  }
  const RankRecord all = *rank.memory.read();
  ASSERT_EQ(all.calls.size(), calls + 1);
  const launch::RecordQuota quota{.calls = 1000, .bytes = 100'000};
  RankRecord got = all;
  ASSERT_TRUE(launch::shorten(got, quota));
  EXPECT_LE(nlohmann::json(got).dump().size(), quota.bytes);
  EXPECT_LE(got.bytes(), 2 * quota.bytes) << "as the leader demands";
  ASSERT_GT(got.calls.size(), 100);
  ASSERT_LT(got.calls.size(), 500);
  EXPECT_EQ(got.calls[0].state, FlightLayout::kPending);
  EXPECT_EQ(got.calls[1].sequence, calls - got.calls.size() + 2);
  EXPECT_EQ(got.calls.back().sequence, calls);
  EXPECT_EQ(got.groups[0].last, calls);
  EXPECT_FALSE(launch::shorten(got, {.calls = 1000, .bytes = 100}));
  // In a large job, each rank may send fewer calls.
  const auto of_many = launch::RecordQuota::of(16'384);
  EXPECT_LE(of_many.bytes * 16'384, size_t{64} << 20);
  RankRecord one_of_many = stuck_rank();
  EXPECT_TRUE(launch::shorten(one_of_many, of_many));
  EXPECT_EQ(one_of_many.calls.size(), of_many.calls);
}

TEST(RecordMessageTest, WhatIsNoRecordIsRefused) {
  const nlohmann::json good = stuck_rank();
  const auto refused = [&good](const char* key, const nlohmann::json& value) {
    nlohmann::json message = good;
    message[key] = value;
    try {
      message.get<RankRecord>();
      return false;
    } catch (const nlohmann::json::exception&) {
      return true;
    }
  };
  EXPECT_FALSE(refused("rank", 2));
  EXPECT_TRUE(refused("rank", 3));
  EXPECT_TRUE(refused("rank", -1));
  EXPECT_TRUE(refused("world_size", 0));
  EXPECT_TRUE(refused("host", 1));
  EXPECT_TRUE(refused("entries", {{1, 2, 3}}));
  const size_t too_many = FlightLayout::kCalls + 1;
  EXPECT_TRUE(refused("entries", std::vector(too_many, good["entries"][0])));
  EXPECT_TRUE(refused("pg_config", {{{"name", "all"}}}));
  RankRecord huge = stuck_rank();  // 10^9 ranks in one group
  huge.groups[0].ranks = {{0, 1'000'000'000, 0}};
  EXPECT_LE(launch::torch_pickle(huge).size(), size_t{1} << 20);
}

/// Three ranks: 0 waits in #3 of all, 1 in #2 of its pair with 0; 2 has not called #3.
FlightFile stuck_job() {
  FlightFile file{.job = "j", .attempt = 1, .world_size = 3, .why = "rank 2 failed (exit code 1)"};
  for (int n = 0; n < 3; ++n) {
    Rank rank(n);
    rank.call(1, 0);
    rank.call(2, 0);
    if (n < 2) rank.call(1, 1);
    if (n == 0) rank.begin(3, 0, "SyncBatchNorm layer 'bn1'");
    if (n == 1) rank.begin(2, 1);
    file.records[n] = *rank.memory.read();
  }
  return file;
}

TEST(FlightFileTest, ExplainsWhoHasNotComeToWhat) {
  const FlightFile read = FlightFile::of(stuck_job().text(), "file");
  EXPECT_EQ(read.records.at(0).calls.size(), 4);
  EXPECT_THAT(
      launch::explanation({read}),
      AllOf(HasSubstr("Job j, attempt 1, 3 ranks, at "), HasSubstr(": rank 2 failed (exit code 1)"),
            HasSubstr("#3 of group 'all', SyncBatchNorm layer 'bn1' of Float [2, 3]:\n"
                      "  rank 0 waits in it, for "),
            HasSubstr("  rank 1 ("), HasSubstr("  rank 2 ("),
            HasSubstr(") has not come to it: its last call of this group is #2, all_reduce of "
                      "Float [2, 3]\n"),
            HasSubstr("#2 of group 'pair', all_reduce of Float [2, 3]:\n  rank 1 waits in it"),
            Not(HasSubstr("missing"))));
}

TEST(FlightFileTest, KeepsItsFormat) {
  const std::string text =
      R"({"attempt":0,"format":"syncbn flight record 2","has_all_nodes":false,"job":"j",)"
      R"("missing":[],"ranks":[0],"unix_ns":1700000000000000000,"why":"w","world_size":2})"
      "\n"
      R"({"entries":[{"collective_seq_id":3,"failed":false,"frames":[{"filename":"syncbn",)"
      R"("line":0,"name":"all_reduce"}],"input_dtypes":["Float"],"input_sizes":[[2,3]],)"
      R"("is_p2p":false,"kind":"all_reduce","name":"all_reduce","op_id":7,)"
      R"("output_dtypes":["Float"],"output_sizes":[[2,3]],"p2p_seq_id":0,"peer":-1,"pg_id":0,)"
      R"("process_group":["all","undefined"],"profiling_name":"nccl:all_reduce","record_id":7,)"
      R"("retired":false,"sizes":[2,3],"state":"started","time_created_ns":1699999999000000000,)"
      R"("time_discovered_completed_ns":null,)"
      R"("time_discovered_started_ns":1699999999000000000,"timeout_ms":0}],"host":"h",)"
      R"("pg_config":{"all":{"desc":"undefined","last_collective":3,"name":"all",)"
      R"("ranks":"[0, 1]"}},"pg_status":{},"pid":1,"rank":0,"version":"2.10","world_size":2})"
      "\n{\"complete\":true}\n";
  EXPECT_EQ(FlightFile::of(text, "file").text(), text);
}

TEST(FlightFileTest, SaysWhatACutOrDamagedFileLacks) {
  const std::string text = stuck_job().text();
  const size_t second = text.find('\n') + 1;
  const size_t third = text.find('\n', second) + 1;
  const FlightFile cut = FlightFile::of(text.substr(0, third + 100), "file");
  EXPECT_THAT(
      launch::explanation({cut}),
      AllOf(HasSubstr("The records of ranks 1 to 2 of a node are missing: its file was cut or "
                      "damaged.\n"),
            HasSubstr("  nothing is known of ranks 1 to 2\n")));
  std::string damaged = text;
  damaged.replace(third, 5, "xxxxx");
  EXPECT_THAT(
      launch::explanation({FlightFile::of(damaged, "file")}),
      HasSubstr("The records of rank 1 of a node are missing: its file was cut or damaged."));
  FlightFile one_node = stuck_job();
  one_node.records.erase(2);
  EXPECT_THAT(launch::explanation({one_node}), HasSubstr("Nothing is recorded of rank 2: give"));
  one_node.has_all_nodes = true;
  EXPECT_THAT(launch::explanation({FlightFile::of(one_node.text(), "file")}),
              HasSubstr("Nothing is recorded of rank 2: no call in a process group of this library "
                        "is known.\n"));
  one_node.missing = {{"node 1 (a)", {2}, "its launcher is gone"}};
  const FlightFile without_a_node = FlightFile::of(one_node.text(), "file");
  EXPECT_THAT(launch::explanation({without_a_node}),
              AllOf(HasSubstr("The records of rank 2 of node 1 (a) are missing: its launcher is "
                              "gone.\n"),
                    Not(HasSubstr("Nothing is recorded"))));
  EXPECT_THAT(launch::explanation({without_a_node, stuck_job()}), Not(HasSubstr("missing")))
      << "with the node's own file";
  EXPECT_THROW(FlightFile::of("{}", "file"), base::UserError);
  EXPECT_THROW(FlightFile::of("", "file"), base::UserError);
}

TEST(FlightFileTest, RefusesMoreThanARankRecords) {
  const std::string text = stuck_job().text();
  const std::string head = text.substr(0, text.find('\n') + 1);
  EXPECT_THAT([&] { FlightFile::of(head + std::string((4 << 20) + 1, ' '), "file"); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("line 2 has 4194305 bytes; the record of a rank has at most 4194304")));
  // Copying it must not overflow the stack.
  std::string deep = head;
  const size_t list = deep.find("\"missing\":[") + 11;
  deep.insert(list, std::string(500'000, '[') + std::string(500'000, ']'));
  EXPECT_THROW(FlightFile::of(deep, "file"), base::UserError);
}

TEST(FlightFileTest, TellsTheFirstOfMuchThatIsOpen) {
  FlightFile file{.job = "j", .world_size = 100, .why = "w"};
  RankRecord waits{.rank = 0, .world_size = 100, .host = "h"};
  for (size_t group = 0; group < 2; ++group) {
    waits.groups.push_back({fmt::format("g{}", group), {{0, 100, 1}}, 1000});
    for (uint64_t n = 1; n <= 60; ++n) {
      waits.calls.push_back({.number = n, .sequence = n, .group = group, .name = "barrier"});
    }
  }
  file.records[0] = waits;
  for (int rank = 1; rank < 100; ++rank) {
    file.records[rank] = {.rank = rank, .world_size = 100, .host = "h"};
  }
  EXPECT_THAT(
      launch::explanation({file}),
      AllOf(HasSubstr("#40 of group 'g1', barrier:\n"),
            HasSubstr("  rank 20 (h) has not come to it: it has called nothing in this "
                      "group\n  ranks 21 to 99 have not either\n"),
            Not(HasSubstr("#41 of group 'g1'")), HasSubstr("20 more collectives are open.\n")));
}

TEST(FlightFileTest, OneFileOfSeveralKeepsWhatEachLacks) {
  TempFolder folder;
  const auto part = [&folder](int rank, const FlightFile::Missing& missing) {
    FlightFile file{.job = "j", .world_size = 5, .why = "w", .has_all_nodes = true};
    file.records[rank] = {.rank = rank, .world_size = 5, .host = "h"};
    file.missing = {missing};
    return folder.write(fmt::format("part{}", rank), file.text());
  };
  const std::string first = part(0, {"node 1 (a)", {1, 2}, "its launcher is gone"});
  const std::string second = part(1, {"node 3 (c)", {3}, "it did not send them"});
  FlightFile cut{.job = "j", .world_size = 5, .why = "w"};
  cut.records[4] = {.rank = 4, .world_size = 5, .host = "h"};
  const std::string text = cut.text();
  const std::string third = folder.write("part4", text.substr(0, text.find('\n') + 9));
  const std::string all = folder / "all";
  launch::explain({"--save=" + all, first, second, third});
  EXPECT_THAT(
      launch::explanation({FlightFile::of(base::read_file(all), all)}),
      AllOf(HasSubstr("The records of rank 2 of node 1 (a) are missing: its launcher is gone.\n"),
            HasSubstr("The records of rank 3 of node 3 (c) are missing: it did not send them.\n"),
            HasSubstr("The records of rank 4 of a node are missing: its file was cut or "
                      "damaged.\n"),
            Not(HasSubstr("Nothing is recorded"))));
}

TEST(RankRecordTest, IsReadIfItsHeaderIsWhole) {
  const RankMemory memory = RankMemory::make();
  const auto is_read = [&memory](const std::function<void(FlightLayout::Header&)>& change) {
    FlightLayout::Header header{};
    header.magic = FlightLayout::kMagic;
    header.version = FlightLayout::kVersion;
    header.pid = 1;
    header.rank = 1;
    header.world_size = 2;
    change(header);
    EXPECT_EQ(::pwrite(memory.fd(), &header, sizeof(header), 0), ssize_t{sizeof(header)});
    return memory.read().has_value();
  };
  EXPECT_TRUE(is_read([](auto&) {}));
  EXPECT_FALSE(is_read([](auto& header) { ++header.magic; }));
  EXPECT_FALSE(is_read([](auto& header) { ++header.version; }));
  EXPECT_FALSE(is_read([](auto& header) { header.pid = 0; }));
  EXPECT_FALSE(is_read([](auto& header) { header.world_size = 0; }));
  EXPECT_FALSE(is_read([](auto& header) { header.rank = -1; }));
  EXPECT_FALSE(is_read([](auto& header) { header.rank = 2; }));
}

}  // namespace
}  // namespace syncbn::test

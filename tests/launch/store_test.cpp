// Our client of TCPStore's protocol against our server, and both against peers that violate it.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <future>
#include <optional>
#include <utility>

#include "store_serving.h"
#include "support/thrown.h"

namespace syncbn::launch::test {
namespace {

using store::begin_query;
using store::put_integer;
using store::put_string;
using store::Query;
using ::syncbn::test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string greeting() {
  std::string bytes = begin_query(Query::kValidate);
  put_integer(bytes, store::kMagic);
  return bytes;
}

std::string query(Query kind, const std::vector<std::string>& strings) {
  std::string bytes = begin_query(kind);
  for (const std::string& one : strings) put_string(bytes, one);
  return bytes;
}

std::string keys_query(Query kind, const std::vector<std::string>& keys) {
  std::string bytes = begin_query(kind);
  put_integer<uint64_t>(bytes, keys.size());
  for (const std::string& key : keys) put_string(bytes, key);
  return bytes;
}

template <typename Integer>
std::string with_integer(std::string bytes, Integer value) {
  put_integer(bytes, value);
  return bytes;
}

template <typename Integer>
std::string integer(Integer value) {
  return with_integer("", value);
}

std::string string(const std::string& text) {
  std::string bytes;
  put_string(bytes, text);
  return bytes;
}

const std::string kStop = integer(store::kStopWaiting);
const std::string kCanceled = integer(store::kWaitCanceled);

RawConnection greeted(const ServingStore& store) {
  RawConnection connection(store.port());
  connection.send(greeting());
  return connection;
}

/// The answer to a query, with a known size.
std::string ask(const RawConnection& connection, const std::string& bytes, size_t size) {
  connection.send(bytes);
  return connection.receive(size);
}

/// Returns when the server has processed all queries of `connection`.
void sync(const RawConnection& connection) {
  EXPECT_EQ(ask(connection, with_integer<uint32_t>(begin_query(Query::kPing), 7), 4),
            integer<uint32_t>(7));
}

TEST(StoreTest, SetsAndGets) {
  const ServingStore store;
  StoreClient one = store.client();
  StoreClient other = store.client();
  const std::string binary("a\0b\xff", 4);
  one.set("key", binary, soon());
  EXPECT_EQ(one.get("key", soon()), binary);  // now the other clients see it too
  EXPECT_EQ(other.get("key", soon()), binary);
  one.set("key", "", soon());
  one.set("large", std::string(store::kMaxValueSize, 'x'), soon());
  EXPECT_EQ(one.get("key", soon()), "");
  EXPECT_EQ(one.get("large", soon()), std::string(store::kMaxValueSize, 'x'));
}

TEST(StoreTest, AddsUp) {
  const ServingStore store;
  StoreClient client = store.client();
  EXPECT_EQ(client.add("n", 5, soon()), 5);
  EXPECT_EQ(client.add("n", -7, soon()), -2);
  EXPECT_EQ(client.get("n", soon()), "-2");
  client.set("n", "41", soon());
  EXPECT_EQ(client.add("n", 1, soon()), 42);
}

TEST(StoreTest, WaitsInTheBackground) {
  const ServingStore store;
  StoreClient waiting = store.client();
  StoreClient writer = store.client();
  waiting.start_wait("a", soon());
  EXPECT_FALSE(waiting.wait_done());
  writer.set("a", "1", soon());
  pollfd ready{waiting.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, -1), 1);
  EXPECT_TRUE(waiting.wait_done());
  EXPECT_EQ(waiting.get("a", soon()), "1");
}

TEST(StoreTest, AskingDuringAWaitIsAnError) {
  const ServingStore store;
  StoreClient client = store.client();
  EXPECT_THROW(client.wait_done(), base::InternalError);
  client.start_wait("a", soon());
  EXPECT_THROW(client.get("a", soon()), base::InternalError);
}

TEST(StoreTest, NobodyListening) {
  const BoundPort nobody;
  EXPECT_THAT(
      message_of<base::UnavailableError>(
          [&] { StoreClient::connect("127.0.0.1", nobody.port, now()); }),
      HasSubstr(fmt::format("127.0.0.1:{}: cannot connect: Connection refused", nobody.port)));
}

TEST(StoreTest, ConnectWaitsForTheStore) {
  Listener listener;  // not accepting yet
  auto client = std::async(std::launch::async, [&] {
    return StoreClient::connect("localhost", listener.port, soon()).add("n", 1, soon());
  });
  StoreServer server(std::move(listener.fd), size_t{1} << 20, {});
  while (client.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    server.handle();
  }
  EXPECT_EQ(client.get(), 1);
}

TEST(StoreTest, WhatAnswersOtherwiseIsNoStore) {
  const Listener listener;
  std::thread stranger([&] {
    const base::UniqueFd fd(::accept(listener.fd.get(), nullptr, nullptr));
    EXPECT_EQ(::send(fd.get(), "HTTP/1.1 400", 12, MSG_NOSIGNAL), 12);
    std::array<char, 64> rest;
    while (::recv(fd.get(), rest.data(), rest.size(), 0) > 0) {
    }
  });
  EXPECT_THAT(message_of<base::UnavailableError>(
                  [&] { StoreClient::connect("127.0.0.1", listener.port, soon()); }),
              HasSubstr("does not answer as a store of torch does"));
  stranger.join();
}

TEST(StoreTest, ALostConnectionIsSaidAndStaysLost) {
  ServingStore store;
  StoreClient client = store.client();
  client.start_wait("a", soon());
  store.run([](StoreServer& server) { server.clear(); });
  pollfd ready{client.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, -1), 1);
  EXPECT_THAT(message_of<base::UnavailableError>([&] { client.wait_done(); }),
              HasSubstr("cannot wait for 'a': it closed the connection"));
  EXPECT_THAT(message_of<base::UnavailableError>([&] { client.get("b", soon()); }),
              HasSubstr("earlier failure"));
}

TEST(StoreServerTest, AWaitEndsWhenTheKeyIsThere) {
  const ServingStore store;
  const RawClient reader(store.port());
  const RawClient writer(store.port());
  auto value = std::async(std::launch::async, [&] {
    reader.start_wait({"late"});
    reader.finish_wait();
    return reader.get("late");
  });
  writer.set("late", "now");
  EXPECT_EQ(value.get(), "now");
}

TEST(StoreServerTest, ChecksAllKeys) {
  const ServingStore store;
  const RawClient client(store.port());
  client.set("a", "1");
  EXPECT_TRUE(client.check({"a"}));
  EXPECT_FALSE(client.check({"a", "b"}));
  EXPECT_TRUE(client.check({}));
}

TEST(StoreServerTest, ComparesAndSets) {
  const ServingStore store;
  const RawClient client(store.port());
  EXPECT_EQ(client.compare_set("k", "expected", "new"), "expected");
  EXPECT_FALSE(client.check({"k"}));
  EXPECT_EQ(client.compare_set("k", "", "first"), "first");
  EXPECT_EQ(client.compare_set("k", "wrong", "new"), "first");
  EXPECT_EQ(client.compare_set("k", "first", "second"), "second");
}

TEST(StoreServerTest, GetsSeveral) {
  const ServingStore store;
  const RawClient client(store.port());
  client.set("a", "1");
  client.set("b", "22");
  EXPECT_THAT(client.multi_get({"b", "a", "b"}), ElementsAre("22", "1", "22"));
  EXPECT_THAT(client.multi_get({}), IsEmpty());
}

TEST(StoreServerTest, Deletes) {
  const ServingStore store;
  const RawClient client(store.port());
  client.set("a", "1");
  EXPECT_TRUE(client.delete_key("a"));
  EXPECT_FALSE(client.delete_key("a"));
  EXPECT_FALSE(client.check({"a"}));
}

TEST(StoreServerTest, AWaitEndsWhenAllKeysAreThere) {
  const ServingStore store;
  const RawClient waiting(store.port());
  const RawClient writer(store.port());
  waiting.start_wait({"a", "b", "a"});
  writer.set("a", "1");
  EXPECT_TRUE(writer.check({"a"}));
  EXPECT_FALSE(waiting.has_answer());
  writer.set("b", "1");
  waiting.finish_wait();
  EXPECT_EQ(waiting.get("b"), "1");
}

TEST(StoreServerTest, AWaitCanBeCancelled) {
  const ServingStore store;
  const RawClient client(store.port());
  const RawClient writer(store.port());
  client.start_wait({"a"});
  EXPECT_FALSE(client.cancel_wait());
  client.start_wait({"a"});
  writer.set("a", "1");
  EXPECT_TRUE(writer.check({"a"}));
  EXPECT_TRUE(client.cancel_wait());
  EXPECT_EQ(client.get("a"), "1");
  client.start_wait({"b", "c", "d", "e"});
  EXPECT_FALSE(client.cancel_wait());
  EXPECT_EQ(client.add("b", 1), 1);
}

TEST(StoreServerTest, ServesItsOwnProcess) {
  ServingStore store;
  const RawClient client(store.port());
  client.set("theirs", "5");
  client.start_wait({"theirs"});
  client.finish_wait();
  const RawClient waiting(store.port());
  waiting.start_wait({"ours"});
  store.run([](StoreServer& server) {
    EXPECT_EQ(server.get("theirs"), "5");
    EXPECT_EQ(server.get("none"), std::nullopt);
    EXPECT_EQ(server.add("theirs", 2), 7);
    server.set("ours", "text");
    EXPECT_EQ(server.get("ours"), "text");
    EXPECT_THAT(message_of<base::UnavailableError>([&] { server.add("ours", 1); }),
                HasSubstr("cannot add 1 to the store's key 'ours': its value 'text'"));
  });
  EXPECT_TRUE(waiting.cancel_wait());
  EXPECT_EQ(client.get("theirs"), "7");
}

TEST(StoreServerTest, ClearForgetsKeysAndWaitsAndConnections) {
  ServingStore store;
  const RawConnection waiting = greeted(store);
  waiting.send(keys_query(Query::kWait, {"/late"}));
  waiting.send(query(Query::kQueuePush, {"/queue", "1"}));
  waiting.send(query(Query::kSet, {"/key", "1"}));
  sync(waiting);
  store.run([](StoreServer& server) {
    server.clear();
    EXPECT_EQ(server.get("key"), std::nullopt);
    server.set("late", "1");
  });
  EXPECT_TRUE(waiting.is_closed());
  const RawConnection other = greeted(store);
  for (const char* key : {"/key", "/queue"}) {
    EXPECT_EQ(ask(other, keys_query(Query::kCheck, {key}), 1), integer(store::kNotReady)) << key;
  }
  EXPECT_EQ(store.client().get("late", soon()), "1");
}

// A launcher may connect at any time, and would treat a closed connection as a refusal.
TEST(StoreServerTest, ClearKeepsConnectionsThatAreNoClients) {
  ServingStore store([](base::Channel channel) { channel.send("hello"); });
  const RawConnection silent(store.port());
  const RawConnection foreign(store.port());
  store.run([&](StoreServer& server) {
    foreign.send("x");
    server.clear();
  });
  EXPECT_EQ(foreign.receive(5), "hello");
  EXPECT_EQ(ask(silent, "x", 5), "hello");
}

TEST(StoreServerTest, QueuesGiveWhatCameFirst) {
  const ServingStore store;
  const RawConnection one = greeted(store);
  const std::string pop = query(Query::kQueuePop, {"/q"});
  EXPECT_EQ(ask(one, pop, 8), integer<int64_t>(0));
  one.send(query(Query::kQueuePush, {"/q", "first"}));
  one.send(query(Query::kQueuePush, {"/q", "second"}));
  EXPECT_EQ(ask(one, query(Query::kQueueLen, {"/q"}), 8), integer<int64_t>(2));
  EXPECT_EQ(ask(one, keys_query(Query::kCheck, {"/q"}), 1), integer(store::kReady));
  EXPECT_EQ(ask(one, begin_query(Query::kGetNumKeys), 8), integer<int64_t>(0));
  EXPECT_EQ(ask(one, pop, 21), integer<int64_t>(2) + string("first"));
  EXPECT_EQ(ask(one, pop, 22), integer<int64_t>(1) + string("second"));
  EXPECT_EQ(ask(one, query(Query::kQueueLen, {"/q"}), 8), integer<int64_t>(0));
}

TEST(StoreServerTest, OneIsWokenForEachThatIsPushed) {
  const ServingStore store;
  std::deque<RawConnection> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.push_back(greeted(store));
    waiting.back().send(keys_query(Query::kWait, {"/q"}));
    sync(waiting.back());
  }
  const RawConnection pusher = greeted(store);
  for (int i = 0; i < 2; ++i) pusher.send(query(Query::kQueuePush, {"/q", "x"}));
  EXPECT_EQ(waiting[0].receive(1), kStop);
  EXPECT_EQ(waiting[1].receive(1), kStop);
  EXPECT_EQ(ask(waiting[2], begin_query(Query::kCancelWait), 1), kCanceled);
}

TEST(StoreServerTest, AppendsAndSetsSeveralAndListsKeys) {
  const ServingStore store;
  const RawConnection one = greeted(store);
  one.send(query(Query::kAppend, {"/a", "x"}));
  one.send(query(Query::kAppend, {"/a", "y"}));
  EXPECT_EQ(ask(one, query(Query::kGet, {"/a"}), 10), string("xy"));
  EXPECT_EQ(ask(one, begin_query(Query::kListKeys), 18), integer<int64_t>(1) + string("/a"));
  std::string several = with_integer<uint64_t>(begin_query(Query::kMultiSet), 2);
  for (const char* text : {"/b", "1", "/c", "2"}) put_string(several, text);
  one.send(several);
  EXPECT_EQ(ask(one, begin_query(Query::kGetNumKeys), 8), integer<int64_t>(3));
  EXPECT_EQ(ask(one, keys_query(Query::kMultiGet, {"/c", "/none"}), 17), string("2") + string(""));
}

TEST(StoreServerTest, ABarrierLetsAllGoWithTheLast) {
  const ServingStore store;
  const std::string enter = with_integer<int64_t>(query(Query::kBarrier, {"/b"}), 3);
  std::deque<RawConnection> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.push_back(greeted(store));
    waiting.back().send(enter);
    sync(waiting.back());
  }
  const RawConnection last = greeted(store);
  EXPECT_EQ(ask(last, enter, 1), kStop);
  for (const RawConnection& one : waiting) EXPECT_EQ(one.receive(1), kStop);
}

TEST(StoreServerTest, HandsOverAConnectionThatSpeaksAnotherProtocol) {
  std::promise<std::string> heard;
  ServingStore store([&](base::Channel channel) {
    channel.send("hello");
    EXPECT_EQ(channel.unsent(), 0U);
    heard.set_value(std::string(channel.input()));
  });
  const RawConnection foreign(store.port());
  EXPECT_EQ(ask(foreign, "GET / HTTP/1.1", 5), "hello");
  EXPECT_EQ(heard.get_future().get().front(), 'G');
  EXPECT_TRUE(foreign.is_closed());
}

TEST(StoreServerTest, ClosesWhatBreaksTheProtocol) {
  const ServingStore store;
  const std::vector<std::string> garbage{
      "GET / HTTP/1.1\r\n\r\n",
      with_integer<uint32_t>(begin_query(Query::kValidate), 0xdeadbeef),
      greeting() + greeting(),
      greeting() + '\x13',
      greeting() + '\xff',
      // Sizes that are too large, without their bytes.
      greeting() + with_integer(begin_query(Query::kGet), store::kMaxKeySize + 1),
      greeting() + with_integer(begin_query(Query::kGet), ~uint64_t{0}),
      greeting() + with_integer(query(Query::kSet, {"/k"}), store::kMaxValueSize + 1),
      greeting() + with_integer(begin_query(Query::kWait), store::kMaxKeys + 1),
      greeting() + with_integer(begin_query(Query::kMultiSet), ~uint64_t{0}),
      // Adding to values that are not numbers.
      greeting() + query(Query::kSet, {"/k", "1x"}) +
          with_integer<int64_t>(query(Query::kAdd, {"/k"}), 1),
      greeting() + query(Query::kSet, {"/k", "9223372036854775807"}) +
          with_integer<int64_t>(query(Query::kAdd, {"/k"}), 1),
      greeting() + query(Query::kSet, {"/k", ""}) +
          with_integer<int64_t>(query(Query::kBarrier, {"/k"}), 1),
      // Two waits at the same time.
      greeting() + keys_query(Query::kWait, {"/w"}) + keys_query(Query::kWait, {"/v"}),
      greeting() + keys_query(Query::kWait, {"/w"}) +
          with_integer<int64_t>(query(Query::kBarrier, {"/b"}), 2),
  };
  StoreClient bystander = store.client();
  for (size_t i = 0; i < garbage.size(); ++i) {
    const RawConnection one(store.port());
    one.send(garbage[i]);
    EXPECT_TRUE(one.is_closed()) << i;
    EXPECT_EQ(bystander.add("n", 1, soon()), static_cast<int64_t>(i + 1));
  }
}

TEST(StoreServerTest, ClosesWhoAsksForMoreThanAMessageHolds) {
  const ServingStore store;
  const RawConnection one = greeted(store);
  one.send(query(Query::kSet, {"/k", std::string(store::kMaxValueSize, 'x')}));
  const size_t too_many = store::kMaxMessageSize / store::kMaxValueSize + 1;
  one.send(keys_query(Query::kMultiGet, std::vector<std::string>(too_many, "/k")));
  EXPECT_TRUE(one.is_closed());
}

TEST(StoreServerTest, ClosesWhoFillsItAndSaysSoOnce) {
  ServingStore store({}, size_t{1} << 20);
  const RawClient other(store.port());
  other.set("kept", "value");
  const std::string value(400 << 10, 'x');
  for (const bool by_query_without_end : {false, true}) {
    const RawConnection one = greeted(store);
    if (by_query_without_end) {
      // Announces 8 MiB, of which more than the store may hold arrive.
      std::string begin = query(Query::kSet, {"/endless", std::string(store::kMaxValueSize, 'x')});
      one.send(begin.substr(0, begin.size() - 1));
    } else {
      for (const char* key : {"/a", "/b", "/c"}) one.send(query(Query::kSet, {key, value}));
    }
    EXPECT_TRUE(one.is_closed());
    EXPECT_EQ(other.get("kept"), "value") << "others go on";
  }
  store.run([](StoreServer& server) {
    const std::vector<std::string> notices = server.take_notices();
    ASSERT_EQ(notices.size(), 1U);
    EXPECT_THAT(notices[0], HasSubstr("the workers' store is full"));
  });
}

TEST(StoreServerTest, ClosesWhoAskForMoreThanFitsAndDoNotRead) {
  ServingStore store;
  const RawClient other(store.port());
  const std::string value(size_t{8} << 20, 'x');
  other.set("k", value);
  std::deque<RawConnection> lazy;
  for (int i = 0; i < 20; ++i) {
    lazy.push_back(greeted(store));
    sync(lazy.back());
  }
  for (const RawConnection& one : lazy) {
    one.send(keys_query(Query::kMultiGet, std::vector<std::string>(6, "/k")));
  }
  other.add("n", 1);  // processed after all other queries
  store.run([](StoreServer& server) {
    EXPECT_LE(server.clients(), 3U) << "48 MiB for each, and 64 MiB in all";
    EXPECT_THAT(server.take_notices(), ElementsAre(HasSubstr("the workers' store is full")));
  });
  lazy.clear();
  EXPECT_EQ(other.get("k"), value);
}

TEST(StoreServerTest, WhatIsRemovedMakesRoom) {
  const ServingStore store({}, size_t{1} << 20);
  const RawClient client(store.port());
  const RawConnection raw = greeted(store);
  const std::string value(300 << 10, 'x');
  for (int i = 0; i < 50; ++i) {
    client.set("key" + std::to_string(i), value);
    client.set("same", value);
    EXPECT_TRUE(client.delete_key("key" + std::to_string(i))) << i;
    raw.send(query(Query::kQueuePush, {"/queue", value}) + query(Query::kQueuePop, {"/queue"}));
    raw.receive(2 * sizeof(uint64_t) + value.size());
    client.start_wait({std::string(4000, 'k')});
    EXPECT_FALSE(client.cancel_wait()) << i;
  }
  EXPECT_EQ(client.get("same"), value);
}

TEST(StoreServerTest, OutlivesClientsThatLeaveInTheMiddle) {
  const ServingStore store;
  const std::string whole = greeting() + keys_query(Query::kWait, {"/a", "/b"});
  for (size_t size = 0; size <= whole.size(); ++size) {
    RawConnection(store.port()).send(whole.substr(0, size));
  }
  const RawClient client(store.port());
  client.set("a", "1");
  client.set("b", "1");
  EXPECT_TRUE(client.check({"a", "b"}));
}

TEST(StoreServerTest, ReadsQueriesThatComeByteByByte) {
  const ServingStore store;
  const RawConnection slow(store.port());
  StoreClient other = store.client();
  std::string bytes = greeting() + query(Query::kSet, {"/k", "value"});
  bytes += keys_query(Query::kCheck, {"/k", "/none"});
  bytes += query(Query::kCompareSet, {"/k", "value", "new"});
  bytes += keys_query(Query::kMultiGet, {"/k", "/k"});
  for (const char byte : bytes) {
    slow.send({&byte, 1});
    // The server is not blocked, and has read the byte.
    other.add("n", 1, soon());
  }
  EXPECT_EQ(slow.receive(34),
            integer(store::kNotReady) + string("new") + string("new") + string("new"));
}

/// Bytes in memory whose beginning can be made unreadable.
class VanishingBytes {
 public:
  explicit VanishingBytes(std::string_view bytes)
      : size_(bytes.size()),
        memory_(
            ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memcpy(memory_, bytes.data(), size_);
  }
  ~VanishingBytes() { ::munmap(memory_, size_); }
  VanishingBytes(const VanishingBytes&) = delete;
  VanishingBytes& operator=(const VanishingBytes&) = delete;

  std::string_view first(size_t count) const { return {static_cast<const char*>(memory_), count}; }
  void vanish(size_t count) { ::mprotect(memory_, count, PROT_NONE); }

 private:
  size_t size_;
  void* memory_;
};

TEST(StoreServerTest, ScansEachByteOnce) {
  std::string query = with_integer<uint64_t>(begin_query(Query::kMultiSet), store::kMaxKeys);
  for (size_t i = 0; i < store::kMaxKeys; ++i) {
    put_string(query, "");
    put_string(query, "");
  }
  VanishingBytes bytes(query + "more");
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  store::QueryScanner scanner;
  for (size_t size = 0; size < query.size(); ++size) {
    ASSERT_EQ(scanner.scan(bytes.first(size)), store::QueryScanner::Result::kIncomplete);
    // All bytes except those of a length that has arrived only in part.
    if (size > page && size % page == 0) bytes.vanish(size - page);
  }
  EXPECT_EQ(scanner.scan(bytes.first(query.size() + 4)), store::QueryScanner::Result::kComplete);
  EXPECT_EQ(scanner.size(), query.size());
}

TEST(StoreServerTest, DoesNotReadFromWhoDoesNotReadItsAnswers) {
  const ServingStore store;
  const RawConnection lazy = greeted(store);
  const std::string key = "/" + std::string(100, 'k');
  const std::string value(1000, 'x');
  lazy.send(query(Query::kSet, {key, value}));
  sync(lazy);
  // 30 MB are more than the kernel buffers. The answers to all queries would take 300 MB.
  std::string queries;
  for (int i = 0; i < 300'000; ++i) queries += query(Query::kGet, {key});
  EXPECT_FALSE(lazy.send_until_stuck(queries).empty());
  StoreClient other = store.client();
  for (int i = 1; i <= 100; ++i) EXPECT_EQ(other.add("n", 1, soon()), i);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(lazy.receive(8 + value.size()), string(value));
  lazy.shutdown();
  EXPECT_EQ(other.add("n", 1, soon()), 101);
}

TEST(StoreServerTest, AnswersAllQueriesOfWhoReadsLate) {
  const ServingStore store;
  const RawConnection late = greeted(store);
  const std::string value(size_t{1} << 16, 'x');
  std::string bytes = query(Query::kSet, {"/k", value});
  constexpr size_t kQueries = 300;  // 20 MB: more than the kernel buffers
  for (size_t i = 0; i < kQueries; ++i) bytes += query(Query::kGet, {"/k"});
  late.send(bytes);
  for (size_t i = 0; i < kQueries; ++i) ASSERT_EQ(late.receive(8 + value.size()), string(value));
  sync(late);
}

TEST(StoreServerTest, ServesTwoHundredConnections) {
  ServingStore store;
  constexpr int kClients = 200;
  std::deque<RawClient> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back(store.port());
    EXPECT_EQ(clients.back().add("came", 1), i + 1);
    clients.back().start_wait({"go", fmt::format("go {}", i)});
  }
  store.run([&](StoreServer& server) {
    EXPECT_EQ(server.get("came"), std::to_string(kClients));
    for (int i = 0; i < kClients; ++i) server.set(fmt::format("go {}", i), "");
    server.set("go", "");
  });
  for (const RawClient& client : clients) EXPECT_NO_THROW(client.finish_wait());
}

/// Limits the process to `left` more descriptors.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const base::UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(next.get()) + left;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(StoreServerTest, IdleClientsLeavePlacesToLaunchers) {
  std::promise<void> came;
  std::optional<ServingStore> store;
  {
    const DescriptorLimit limit(100);
    store.emplace([&](base::Channel /*launcher*/) { came.set_value(); });
  }
  std::deque<RawConnection> idle;
  const std::string ping = with_integer<uint32_t>(begin_query(Query::kPing), 7);
  do {
    idle.push_back(greeted(*store));
  } while (idle.size() < 200 && !ask(idle.back(), ping, 4).empty());
  EXPECT_LT(idle.size(), 60U);
  const RawConnection launcher(store->port());
  launcher.send("syncbn-agent");
  EXPECT_EQ(came.get_future().wait_until(soon()), std::future_status::ready);
  sync(idle.front());
  store->run([](StoreServer& server) {
    EXPECT_THAT(server.take_notices(), ElementsAre(HasSubstr("accepts no more")));
  });
}

TEST(StoreAnswersTest, CountsTheMemoryThatTheyTake) {
  const std::pair<const char*, std::string (*)(const std::string&)> queries[] = {
      {"values",
       [](const std::string& key) {
         return query(Query::kSet, {key, ""});
       }},
      {"queues",
       [](const std::string& key) {
         return query(Query::kQueuePush, {key, ""});
       }},
      {"waits", [](const std::string& key) { return keys_query(Query::kWait, {key}); }},
  };
  for (const auto& [name, make] : queries) {
    for (const size_t length : {1, 40}) {
      StoreAnswers answers([](uint64_t) {}, size_t{1} << 20);
      std::string out;
      const size_t before = ::mallinfo2().uordblks;
      for (uint64_t client = 0; client < 20'000; ++client) {
        const std::string key = fmt::format("{:0{}}", client, length);
        EXPECT_TRUE(answers.answer(client, make(key), out));
      }
      EXPECT_LE(::mallinfo2().uordblks - before, answers.bytes()) << name << " " << length;
    }
  }
}

TEST(StoreServerTest, DropsWhoComesWhenNoDescriptorIsLeft) {
  const ServingStore store;
  const RawConnection before = greeted(store);
  sync(before);
  {
    const DescriptorLimit limit(1);
    const RawConnection refused(store.port());
    EXPECT_TRUE(refused.is_closed());
    sync(before);
  }
  EXPECT_EQ(store.client().add("n", 1, soon()), 1);
}

}  // namespace
}  // namespace syncbn::launch::test

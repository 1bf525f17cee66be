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

using store::make_query;
using store::Query;
using ::syncbn::test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kGreeting = make_query(Query::kValidate, store::kMagic);

/// The answer to a query, with a known size.
std::string ask(const RawConnection& connection, const std::string& bytes, size_t size) {
  connection.send(bytes);
  return connection.receive(size);
}

/// Returns when the server has processed all queries of `connection`.
void sync(const RawConnection& connection) {
  EXPECT_EQ(ask(connection, make_query(Query::kPing, uint32_t{7}), 4), bytes(uint32_t{7}));
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
  store.client().add("n", 1, soon());  // answered after the server has read the wait
  store.run([](StoreServer& server) { server.clear(); });
  pollfd ready{client.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, -1), 1);
  EXPECT_THAT(message_of<base::UnavailableError>([&] { client.wait_done(); }),
              HasSubstr("cannot wait for 'a': it closed the connection"));
  EXPECT_THAT(message_of<base::UnavailableError>([&] { client.get("b", soon()); }),
              HasSubstr("earlier failure"));
}

TEST(StoreServerTest, AnswersAsTorchsServer) {
  const ServingStore store;
  const RawConnection client = greeted(store.port());
  expect_answers(client, exchanges_of_all_versions());
  const std::string pop = make_query(Query::kQueuePop, "/q");
  const std::string length = make_query(Query::kQueueLen, "/q");
  expect_answers(client, {{make_query(Query::kCheck, Keys{}), bytes(store::kReady)},
                          {make_query(Query::kMultiGet, Keys{}), ""},
                          {make_query(Query::kListKeys), bytes(int64_t{1}, "/n")},
                          {pop, bytes(int64_t{0})},
                          {make_query(Query::kQueuePush, "/q", "first"), ""},
                          {make_query(Query::kQueuePush, "/q", "second"), ""},
                          {length, bytes(int64_t{2})},
                          {make_query(Query::kCheck, Keys{"/q"}), bytes(store::kReady)},
                          {make_query(Query::kGetNumKeys), bytes(int64_t{1})},
                          {pop, bytes(int64_t{2}, "first")},
                          {pop, bytes(int64_t{1}, "second")},
                          {length, bytes(int64_t{0})},
                          {make_query(Query::kAppend, "/a", "x"), ""},
                          {make_query(Query::kAppend, "/a", "y"), ""},
                          {make_query(Query::kGet, "/a"), bytes("xy")},
                          {make_query(Query::kMultiSet, uint64_t{2}, "/b", "1", "/c", "2"), ""},
                          {make_query(Query::kGetNumKeys), bytes(int64_t{4})},
                          {make_query(Query::kMultiGet, Keys{"/c", "/none"}), bytes("2", "")}});
  sync(client);
}

TEST(StoreServerTest, AWaitEndsWhenAllKeysAreThere) {
  const ServingStore store;
  const RawConnection waiting = greeted(store.port());
  StoreClient writer = store.client();
  waiting.send(make_query(Query::kWait, Keys{"/a", "/b", "/a"}));
  writer.set("a", "1", soon());
  EXPECT_EQ(writer.get("a", soon()), "1");
  EXPECT_FALSE(waiting.has_received());
  writer.set("b", "1", soon());
  EXPECT_EQ(waiting.receive(1), kStop);
  // A wait that has ended can no longer be cancelled.
  waiting.send(make_query(Query::kWait, Keys{"/c"}));
  writer.set("c", "1", soon());
  EXPECT_EQ(writer.get("c", soon()), "1");
  EXPECT_EQ(ask(waiting, make_query(Query::kCancelWait), 2), kStop + kCanceled);
}

TEST(StoreServerTest, ServesItsOwnProcess) {
  ServingStore store;
  StoreClient client = store.client();
  StoreClient waiting = store.client();
  client.set("theirs", "5", soon());
  EXPECT_EQ(client.get("theirs", soon()), "5");
  waiting.start_wait("ours", soon());
  store.run([](StoreServer& server) {
    EXPECT_EQ(server.get("theirs"), "5");
    EXPECT_EQ(server.get("none"), std::nullopt);
    EXPECT_EQ(server.add("theirs", 2), 7);
    server.set("ours", "text");
    EXPECT_EQ(server.get("ours"), "text");
    EXPECT_THAT(message_of<base::UnavailableError>([&] { server.add("ours", 1); }),
                HasSubstr("cannot add 1 to the store's key 'ours': its value 'text'"));
  });
  pollfd ready{waiting.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, -1), 1);
  EXPECT_TRUE(waiting.wait_done());
  EXPECT_EQ(client.get("theirs", soon()), "7");
}

TEST(StoreServerTest, ClearForgetsKeysAndWaitsAndConnections) {
  ServingStore store;
  const RawConnection waiting = greeted(store.port());
  waiting.send(make_query(Query::kWait, Keys{"/late"}));
  waiting.send(make_query(Query::kQueuePush, "/queue", "1"));
  waiting.send(make_query(Query::kSet, "/key", "1"));
  sync(waiting);
  store.run([](StoreServer& server) {
    server.clear();
    EXPECT_EQ(server.get("key"), std::nullopt);
    server.set("late", "1");
  });
  EXPECT_TRUE(waiting.is_closed());
  const RawConnection other = greeted(store.port());
  for (const char* key : {"/key", "/queue"}) {
    EXPECT_EQ(ask(other, make_query(Query::kCheck, Keys{key}), 1), bytes(store::kNotReady)) << key;
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

TEST(StoreServerTest, OneIsWokenForEachThatIsPushed) {
  const ServingStore store;
  std::deque<RawConnection> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.push_back(greeted(store.port()));
    waiting.back().send(make_query(Query::kWait, Keys{"/q"}));
    sync(waiting.back());
  }
  const RawConnection pusher = greeted(store.port());
  for (int i = 0; i < 2; ++i) pusher.send(make_query(Query::kQueuePush, "/q", "x"));
  EXPECT_EQ(waiting[0].receive(1), kStop);
  EXPECT_EQ(waiting[1].receive(1), kStop);
  EXPECT_EQ(ask(waiting[2], make_query(Query::kCancelWait), 1), kCanceled);
}

TEST(StoreServerTest, ABarrierLetsAllGoWithTheLast) {
  const ServingStore store;
  const std::string enter = make_query(Query::kBarrier, "/b", int64_t{3});
  std::deque<RawConnection> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.push_back(greeted(store.port()));
    waiting.back().send(enter);
    sync(waiting.back());
  }
  const RawConnection last = greeted(store.port());
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
      make_query(Query::kValidate, uint32_t{0xdeadbeef}),
      kGreeting + kGreeting,
      kGreeting + '\x13',
      kGreeting + '\xff',
      // Sizes that are too large, without their bytes.
      kGreeting + make_query(Query::kGet, store::kMaxKeySize + 1),
      kGreeting + make_query(Query::kGet, ~uint64_t{0}),
      kGreeting + make_query(Query::kSet, "/k", store::kMaxValueSize + 1),
      kGreeting + make_query(Query::kWait, store::kMaxKeys + 1),
      kGreeting + make_query(Query::kMultiSet, ~uint64_t{0}),
      // Adding to values that are not numbers.
      kGreeting + make_query(Query::kSet, "/k", "1x") + make_query(Query::kAdd, "/k", int64_t{1}),
      kGreeting + make_query(Query::kSet, "/k", "9223372036854775807") +
          make_query(Query::kAdd, "/k", int64_t{1}),
      kGreeting + make_query(Query::kSet, "/k", "") + make_query(Query::kBarrier, "/k", int64_t{1}),
      // Two waits at the same time.
      kGreeting + make_query(Query::kWait, Keys{"/w"}) + make_query(Query::kWait, Keys{"/v"}),
      kGreeting + make_query(Query::kWait, Keys{"/w"}) +
          make_query(Query::kBarrier, "/b", int64_t{2}),
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
  const RawConnection one = greeted(store.port());
  one.send(make_query(Query::kSet, "/k", std::string(store::kMaxValueSize, 'x')));
  const size_t too_many = store::kMaxMessageSize / store::kMaxValueSize + 1;
  one.send(make_query(Query::kMultiGet, Keys(too_many, "/k")));
  EXPECT_TRUE(one.is_closed());
}

TEST(StoreServerTest, ClosesWhoFillsItAndSaysSoOnce) {
  ServingStore store({}, size_t{1} << 20);
  StoreClient other = store.client();
  other.set("kept", "value", soon());
  const std::string value(400 << 10, 'x');
  for (const bool by_query_without_end : {false, true}) {
    const RawConnection one = greeted(store.port());
    if (by_query_without_end) {
      // Announces 8 MiB, of which more than the store may hold arrive.
      std::string begin =
          make_query(Query::kSet, "/endless", std::string(store::kMaxValueSize, 'x'));
      one.send(begin.substr(0, begin.size() - 1));
    } else {
      for (const char* key : {"/a", "/b", "/c"}) one.send(make_query(Query::kSet, key, value));
    }
    EXPECT_TRUE(one.is_closed());
    EXPECT_EQ(other.get("kept", soon()), "value") << "others go on";
  }
  store.run([](StoreServer& server) {
    const std::vector<std::string> notices = server.take_notices();
    ASSERT_EQ(notices.size(), 1U);
    EXPECT_THAT(notices[0], HasSubstr("the workers' store is full"));
  });
}

TEST(StoreServerTest, ClosesWhoAskForMoreThanFitsAndDoNotRead) {
  ServingStore store;
  StoreClient other = store.client();
  const std::string value(size_t{8} << 20, 'x');
  other.set("k", value, soon());
  std::deque<RawConnection> lazy;
  for (int i = 0; i < 20; ++i) {
    lazy.push_back(greeted(store.port()));
    sync(lazy.back());
  }
  for (const RawConnection& one : lazy) {
    one.send(make_query(Query::kMultiGet, Keys(6, "/k")));
  }
  other.add("n", 1, soon());  // processed after all other queries
  store.run([](StoreServer& server) {
    EXPECT_LE(server.clients(), 3U) << "48 MiB for each, and 64 MiB in all";
    EXPECT_THAT(server.take_notices(), ElementsAre(HasSubstr("the workers' store is full")));
  });
  lazy.clear();
  EXPECT_EQ(other.get("k", soon()), value);
}

TEST(StoreServerTest, WhatIsRemovedMakesRoom) {
  const ServingStore store({}, size_t{1} << 20);
  const RawConnection client = greeted(store.port());
  const std::string value(300 << 10, 'x');
  for (int i = 0; i < 50; ++i) {
    const std::string key = "/key" + std::to_string(i);
    expect_answers(client, {{make_query(Query::kSet, key, value), ""},
                            {make_query(Query::kSet, "/same", value), ""},
                            {make_query(Query::kDeleteKey, key), bytes(int64_t{1})},
                            {make_query(Query::kQueuePush, "/queue", value), ""},
                            {make_query(Query::kQueuePop, "/queue"), bytes(int64_t{1}, value)},
                            {make_query(Query::kWait, Keys{std::string(4000, 'k')}), ""},
                            {make_query(Query::kCancelWait), kCanceled}});
  }
  expect_answers(client, {{make_query(Query::kGet, "/same"), bytes(value)}});
}

TEST(StoreServerTest, OutlivesClientsThatLeaveInTheMiddle) {
  const ServingStore store;
  const std::string whole = kGreeting + make_query(Query::kWait, Keys{"/a", "/b"});
  for (size_t size = 0; size <= whole.size(); ++size) {
    RawConnection(store.port()).send(whole.substr(0, size));
  }
  StoreClient client = store.client();
  client.set("a", "1", soon());
  client.set("b", "1", soon());
  EXPECT_EQ(client.get("b", soon()), "1");
}

TEST(StoreServerTest, ReadsQueriesThatComeByteByByte) {
  const ServingStore store;
  const RawConnection slow(store.port());
  StoreClient other = store.client();
  std::string queries = kGreeting + make_query(Query::kSet, "/k", "value");
  queries += make_query(Query::kCheck, Keys{"/k", "/none"});
  queries += make_query(Query::kCompareSet, "/k", "value", "new");
  queries += make_query(Query::kMultiGet, Keys{"/k", "/k"});
  for (const char byte : queries) {
    slow.send({&byte, 1});
    // The server is not blocked, and has read the byte.
    other.add("n", 1, soon());
  }
  EXPECT_EQ(slow.receive(34), bytes(store::kNotReady, "new", "new", "new"));
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
  std::string query = make_query(Query::kMultiSet, uint64_t{store::kMaxKeys});
  for (size_t i = 0; i < store::kMaxKeys; ++i) {
    query += bytes("", "");
  }
  VanishingBytes stream(query + "more");
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  store::QueryScanner scanner;
  for (size_t size = 0; size < query.size(); ++size) {
    ASSERT_EQ(scanner.scan(stream.first(size)), store::QueryScanner::Result::kIncomplete);
    // All bytes except those of a length that has arrived only in part.
    if (size > page && size % page == 0) stream.vanish(size - page);
  }
  EXPECT_EQ(scanner.scan(stream.first(query.size() + 4)), store::QueryScanner::Result::kComplete);
  EXPECT_EQ(scanner.size(), query.size());
}

TEST(StoreServerTest, DoesNotReadFromWhoDoesNotReadItsAnswers) {
  const ServingStore store;
  const RawConnection lazy = greeted(store.port());
  const std::string key = "/" + std::string(100, 'k');
  const std::string value(1000, 'x');
  lazy.send(make_query(Query::kSet, key, value));
  sync(lazy);
  // 30 MB are more than the kernel buffers. The answers to all queries would take 300 MB.
  std::string queries;
  for (int i = 0; i < 300'000; ++i) queries += make_query(Query::kGet, key);
  EXPECT_FALSE(lazy.send_until_stuck(queries).empty());
  StoreClient other = store.client();
  for (int i = 1; i <= 100; ++i) EXPECT_EQ(other.add("n", 1, soon()), i);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(lazy.receive(8 + value.size()), bytes(value));
  lazy.shutdown();
  EXPECT_EQ(other.add("n", 1, soon()), 101);
}

TEST(StoreServerTest, AnswersAllQueriesOfWhoReadsLate) {
  const ServingStore store;
  const RawConnection late = greeted(store.port());
  const std::string value(size_t{1} << 16, 'x');
  std::string queries = make_query(Query::kSet, "/k", value);
  constexpr size_t kQueries = 300;  // 20 MB: more than the kernel buffers
  for (size_t i = 0; i < kQueries; ++i) queries += make_query(Query::kGet, "/k");
  late.send(queries);
  for (size_t i = 0; i < kQueries; ++i) ASSERT_EQ(late.receive(8 + value.size()), bytes(value));
  sync(late);
}

TEST(StoreServerTest, ServesTwoHundredConnections) {
  ServingStore store;
  constexpr int kClients = 200;
  std::deque<RawConnection> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(greeted(store.port()));
    expect_answers(clients.back(),
                   {{make_query(Query::kAdd, "/came", int64_t{1}), bytes(int64_t{i + 1})},
                    {make_query(Query::kWait, Keys{"/go", fmt::format("/go {}", i)}), ""}});
  }
  store.run([&](StoreServer& server) {
    EXPECT_EQ(server.get("came"), std::to_string(kClients));
    for (int i = 0; i < kClients; ++i) server.set(fmt::format("go {}", i), "");
    server.set("go", "");
  });
  for (const RawConnection& client : clients) EXPECT_EQ(client.receive(1), kStop);
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
  const std::string ping = make_query(Query::kPing, uint32_t{7});
  do {
    idle.push_back(greeted(store->port()));
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
      {"values", [](const std::string& key) { return make_query(Query::kSet, key, ""); }},
      {"queues", [](const std::string& key) { return make_query(Query::kQueuePush, key, ""); }},
      {"waits", [](const std::string& key) { return make_query(Query::kWait, Keys{key}); }},
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
  const RawConnection before = greeted(store.port());
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

// The connections between ranks outside of collectives.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/handshake.h>
#include <syncbn/base/job_secret.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "monitor/monitor_channel.h"
#include "support/connection.h"
#include "support/eventually.h"
#include "support/listener.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

using syncbn::base::Handshake;
using syncbn::base::UniqueFd;
using syncbn::dist::detail::Message;
using syncbn::dist::detail::MonitorChannel;
using syncbn::dist::detail::MonitorLink;
using syncbn::test::connect_to;
using syncbn::test::eventually;
using syncbn::test::run_ranks;
using syncbn::test::send_to;
using ::testing::HasSubstr;

// Linux sends no keepalive probes while sent data is not acknowledged.
TEST(MonitorLinkTest, AHostThatIsGoneIsGivenUpAfterElevenSeconds) {
  const syncbn::test::Listener listener;
  const MonitorLink link(connect_to(listener.port), Handshake::Side::kClient);
  const auto option = [&](int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    EXPECT_EQ(::getsockopt(link.channel.fd(), IPPROTO_TCP, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(TCP_USER_TIMEOUT), 11'000);
  EXPECT_EQ(option(TCP_KEEPIDLE) + option(TCP_KEEPCNT) * option(TCP_KEEPINTVL), 11);
}

/// Rank 0 of two, to which others connect.
struct RankZero {
  RankZero() {
    channel.start({.message = [](const Message&) {},
                   .end = [this](int, const std::string&) { ++ended; },
                   .tick = [] {}});
  }

  Message place() {
    const std::vector<uint8_t> bytes = store.get("syncbn/monitor");
    return *Message::parse({bytes.begin(), bytes.end()});
  }
  int port() { return static_cast<int>(place().number(1)); }
  /// The other rank connects.
  void complete() {
    const MonitorChannel other(store, 1, 2, "127.0.0.1", std::chrono::seconds(20));
  }

  std::atomic<int> ended{0};  ///< number of ranks whose connection has ended
  c10d::HashStore store;
  MonitorChannel channel{store, 0, 2, "127.0.0.1", std::chrono::seconds(20)};
};

// Rank 0 has died meanwhile, and the store, which a launcher holds, still exists.
TEST(MonitorChannelTest, ARankZeroThatDoesNotListenIsNamedAfterTheConnectTimeout) {
  c10d::HashStore store;
  EXPECT_THAT(syncbn::test::message_of<syncbn::base::UnavailableError>([&] {
                const MonitorChannel one(store, 1, 2, "127.0.0.1", std::chrono::milliseconds(100));
              }),
              HasSubstr("rank 0 arrived and then did not listen for the other ranks"));
}

/// Waits until the other side closes the connection.
bool is_closed(const UniqueFd& fd) {
  char byte = 0;
  return ::recv(fd.get(), &byte, 1, 0) <= 0;
}

TEST(MonitorChannelTest, StrangersAreTurnedAway) {
  run_ranks(1, [](int) {
    RankZero zero;
    const UniqueFd nonsense = connect_to(zero.port());
    ASSERT_TRUE(send_to(nonsense, "GET / HTTP/1.1\r\n"));
    EXPECT_TRUE(is_closed(nonsense));
    const UniqueFd endless = connect_to(zero.port());
    ASSERT_TRUE(send_to(endless, std::string(100'000, 'x')));
    EXPECT_TRUE(is_closed(endless));
    const UniqueFd wrong_job = connect_to(zero.port());
    ASSERT_TRUE(send_to(wrong_job, "syncbn-monitor 1\n1\t0\thello\tanother token\there\n"));
    EXPECT_TRUE(is_closed(wrong_job));
    for (const int rank : {-1, 0, 7}) {
      const UniqueFd nobody = connect_to(zero.port());
      ASSERT_TRUE(send_to(nobody, fmt::format("syncbn-monitor 1\n{}\t0\thello\t{}\there\n", rank,
                                              zero.place().field(2))));
      EXPECT_TRUE(is_closed(nobody)) << rank;
    }
    const UniqueFd silent = connect_to(zero.port());
    zero.complete();
    EXPECT_TRUE(is_closed(silent));
  });
}

TEST(MonitorChannelTest, SilentConnectionsKeepNoRankOut) {
  run_ranks(1, [](int) {
    RankZero zero;
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 100; ++i) silent.push_back(connect_to(zero.port()));
    zero.complete();
    // A connection may be silent for 30 s.
    EXPECT_TRUE(eventually([&] { return zero.ended == 1; }, std::chrono::seconds(20)));
  });
}

/// Gives this process a secret, as its launcher would.
void take_secret(char digit) {
  static UniqueFd memory;
  memory = syncbn::base::share_secret(std::string(64, digit));
  // job_secret() closes its descriptor.
  ::setenv(syncbn::base::kSecretDescriptor, std::to_string(::dup(memory.get())).c_str(), 1);
  ASSERT_EQ(syncbn::base::job_secret(), std::string(64, digit));
  EXPECT_EQ(std::getenv(syncbn::base::kSecretDescriptor), nullptr);
}

/// What the other side of `fd` sends until it closes the connection, or up to the end of a line.
std::string line_from(const UniqueFd& fd) {
  std::string line;
  for (char byte = 0; ::recv(fd.get(), &byte, 1, 0) == 1 && byte != '\n';) line += byte;
  return line;
}

TEST(MonitorChannelTest, OnlyRanksWithTheSecretOfTheirLauncherAreHeard) {
  run_ranks(1, [](int) {
    take_secret('a');
    std::ostringstream log;
    spdlog::default_logger()->sinks() = {std::make_shared<spdlog::sinks::ostream_sink_mt>(log)};
    RankZero zero;
    const auto stranger = [&zero](const std::string& text) {
      const UniqueFd fd = connect_to(zero.port());
      EXPECT_TRUE(send_to(fd, text));
      return line_from(fd) + line_from(fd);
    };
    const std::string hello = "1\t0\thello\t" + zero.place().field(2) + "\there\n";
    EXPECT_EQ(stranger("syncbn-monitor 1\n" + hello), "") << "without a secret";
    // A stranger with another secret.
    const Handshake::Parties parties{"syncbn-monitor 1", "rank", "rank 0", "secret", "a test"};
    Handshake other(Handshake::Side::kClient, parties, std::string(64, 'b'));
    const UniqueFd guesser = connect_to(zero.port());
    EXPECT_TRUE(send_to(guesser, other.begin()));
    EXPECT_TRUE(send_to(guesser, other.take(line_from(guesser)) + hello));
    EXPECT_THAT(line_from(guesser), HasSubstr("refused its secret"));
    EXPECT_TRUE(is_closed(guesser));
    // A rank, and then a stranger that repeats what the rank has sent.
    Handshake good(Handshake::Side::kClient, parties, std::string(64, 'a'));
    const std::string greeting = good.begin();
    std::string proof;
    {
      const UniqueFd rank = connect_to(zero.port());
      EXPECT_TRUE(send_to(rank, greeting));
      proof = good.take(line_from(rank));
      EXPECT_TRUE(send_to(rank, proof));
      good.take(line_from(rank));
      EXPECT_TRUE(good.is_done());
    }
    EXPECT_THAT(stranger(greeting + proof + hello), HasSubstr("refused its secret"));
    EXPECT_EQ(zero.ended, 0);
    zero.complete();
    EXPECT_TRUE(eventually([&] { return zero.ended == 1; }));
    const std::string said = log.str();
    EXPECT_THAT(
        said,
        HasSubstr("refused a connection from 127.0.0.1 to its peer monitor: it has no secret"));
    EXPECT_EQ(said.find("refused"), said.rfind("refused")) << said;
  });
}

TEST(MonitorChannelTest, ARankWithoutTheSecretOfItsLauncherSaysSo) {
  run_ranks(1, [](int) {
    c10d::HashStore store;
    const std::string place = "0\t-1\tplace\t127.0.0.1\t1\ttoken\there\tsecret";
    store.set("syncbn/monitor", std::vector<uint8_t>(place.begin(), place.end()));
    EXPECT_THAT(syncbn::test::message_of<syncbn::base::UserError>([&] {
                  const MonitorChannel one(store, 1, 2, "127.0.0.1", std::chrono::seconds(20));
                }),
                HasSubstr("did not inherit the secret"));
  });
}

// Nor may they keep the ranks out.
TEST(MonitorChannelTest, ManySilentStrangersAreAcceptedOnlyInPart) {
  run_ranks(1, [](int) {
    const auto open_files = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    };
    const auto before = open_files();
    RankZero zero;
    std::vector<UniqueFd> strangers;
    for (int i = 0; i < 200; ++i) strangers.push_back(connect_to(zero.port()));
    ::usleep(500'000);  // time for rank 0 to accept them
    EXPECT_LT(open_files() - before, 200 + 80);
    strangers.clear();
    zero.complete();
    EXPECT_TRUE(eventually([&] { return open_files() - before < 30; }));
  });
}

// Measures processor time, to which other processes do not add.
TEST(MonitorChannelTest, WithoutAFreeFileRankZeroIsNotBusy) {
  run_ranks(1, [](int) {
    RankZero zero;
    const int port = zero.port();
    UniqueFd last;  // uses up the last free descriptor
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    {
      const UniqueFd next(::dup(STDERR_FILENO));
      const rlimit low{static_cast<rlim_t>(next.get()) + 1, before.rlim_max};
      ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    }
    last = connect_to(port);
    const std::clock_t start = std::clock();
    ::usleep(1'000'000);  // the span that is measured
    EXPECT_LT(std::clock() - start, CLOCKS_PER_SEC / 4);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    zero.complete();
    EXPECT_TRUE(is_closed(last));
  });
}

}  // namespace

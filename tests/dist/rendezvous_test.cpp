// How ranks find each other, by the environment or a URL, and through which interface; and the
// errors if they do not.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/dist/process_group.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "dist/group.h"
#include "rendezvous/arrival.h"
#include "rendezvous/group_store.h"
#include "rendezvous/interfaces.h"
#include "rendezvous/place.h"
#include "support/eventually.h"
#include "support/listener.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::dist::detail::gloo_key;
using syncbn::test::Listener;
using syncbn::test::message_of;
using syncbn::test::RankResult;
using syncbn::test::run_group;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// This rank's part of a sum over the ranks 0 and 1.
void expect_sum_of_two(int rank) {
  at::Tensor tensor = at::full({3}, rank + 1.0);
  dist::all_reduce(tensor);
  EXPECT_TRUE(tensor.equal(at::full({3}, 3.0)));
}

TEST(RendezvousTest, TcpUrlTakesRankAndWorldSizeFromTheOptions) {
  const int port = syncbn::test::free_port();
  const auto results = run_ranks_and_collect({.set_master = false}, [port](int rank) {
    ::unsetenv("RANK");
    ::unsetenv("WORLD_SIZE");
    dist::init_process_group(
        {.init_method = "tcp://127.0.0.1:" + std::to_string(port), .rank = rank, .world_size = 2});
    EXPECT_EQ(dist::world_size(), 2);
    expect_sum_of_two(rank);
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(RendezvousTest, MalformedEnvironmentIsNamed) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "two", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                HasSubstr("WORLD_SIZE=two"));
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("RANK", "2", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                HasSubstr("RANK=2 is not below WORLD_SIZE=2"));
    ::setenv("RANK", "0", 1);
    ::unsetenv("MASTER_ADDR");
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                HasSubstr("MASTER_ADDR is not set"));
  });
}

TEST(RendezvousTest, UnknownBackendAndMethodAreNamed) {
  for (const char* backend : {"glo", "", "cpu:nccl", "cpu:gloo,cpu:gloo", "cpu:gloo,"}) {
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.backend = backend}); }),
                HasSubstr("backend '" + std::string(backend) + "' is not known; it is auto"));
  }
  EXPECT_THAT(message_of<UserError>([] { dist::init_process_group({.init_method = "udp://x:1"}); }),
              HasSubstr("udp://x:1"));
  for (const char* url : {"tcp://h:123abc", "tcp://h", "tcp://h:0", "tcp://::1:5"}) {
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.init_method = url}); }),
                HasSubstr(std::string(url) + "' is not tcp://host:port"));
  }
}

TEST(RendezvousTest, BackendsMayBeWrittenInEachOfPyTorchsWays) {
  run_ranks(1, [](int) {
    for (const char* backend : {"gloo", "GLOO", "cpu:gloo", "Cpu:Gloo", "auto"}) {
      dist::init_process_group({.backend = backend});
      EXPECT_EQ(dist::world_size(), 1) << backend;
      dist::destroy_process_group();
    }
  });
}

// It would silently train on the CPU although it was started for a GPU.
TEST(RendezvousTest, AutoIsRefusedWhereTheLauncherGaveAGpuThatCannotBeUsed) {
  run_ranks(1, [](int) {
    ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
    ::setenv("SYNCBN_GPU_PER_WORKER", "1", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                AllOf(HasSubstr("backend auto: the launcher gave this worker a GPU"),
                      HasSubstr("choose backend gloo (device cpu) to train on the CPU")));
    dist::init_process_group({.backend = "gloo"});
  });
}

/// Counts the queries.
class CountingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    ++questions;
    return HashStore::check(keys);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++questions;
    return HashStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++questions;
    return HashStore::multiGet(keys);
  }
  int questions = 0;
};

TEST(RendezvousTest, ARankAsksAboutAThousandOthersInAFewQuestions) {
  constexpr int kRanks = 1000;
  for (const int own : {0, 500}) {
    CountingStore store;
    c10d::Store& base = store;
    for (int rank = 0; rank < kRanks; ++rank) {
      // Rank 700 is one of Python's.
      if (rank == 700) base.set(gloo_key(rank), "address");
      if (rank != own && rank != 700) {
        base.set("syncbn/arrived/" + std::to_string(rank), "gloo|none|process|network|host");
      }
    }
    if (own > 0) base.set("syncbn/backend", "gloo");
    dist::detail::Place place;
    place.rank = own;
    place.world_size = kRanks;
    const auto arrived =
        arrive(store, place, {.rank = own, .backend = "gloo", .gpu = "none", .where = "host"},
               /*holds_store=*/false, std::chrono::steady_clock::now() + std::chrono::seconds(60),
               milliseconds(60'000), [] { return false; });
    ASSERT_TRUE(arrived);
    EXPECT_THAT(arrived->python_ranks, ElementsAre(700));
    EXPECT_EQ(arrived->choice.backend, "gloo");
    EXPECT_LT(store.questions, 100) << own;
  }
}

/// The store of ranks 0 and 1, in a separate process, as a launcher holds it.
class AgentStore {
 public:
  AgentStore() {
    if (::pipe(orders_) != 0 || ::pipe(answers_) != 0) syncbn::base::throw_errno("pipe");
  }

  /// Runs the ranks, once all have connected.
  void run(const std::function<void(int rank)>& body) {
    run_ranks(3, [&](int rank) {
      ::setenv("WORLD_SIZE", "2", 1);
      ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
      if (rank == 2) return serve();
      answer();  // waits until the store exists
      dist::init_process_group();
      dist::barrier();
      body(rank);
      send(kThrough);
    });
  }

  // The ranks call these.
  void empty() { order(kEmpty); }
  /// @return the process that SIGCONT resumes
  pid_t stop() {
    const pid_t holder = order(kStop);
    EXPECT_TRUE(syncbn::test::eventually([&] {
      std::ifstream file("/proc/" + std::to_string(holder) + "/stat");
      return std::string(std::istreambuf_iterator<char>(file), {}).find(") T") != std::string::npos;
    }));
    return holder;
  }

 private:
  void send(char order) { EXPECT_EQ(::write(orders_[1], &order, 1), 1); }
  pid_t order(char order) {
    send(order);
    return answer();
  }
  pid_t answer() {
    pid_t holder = 0;
    EXPECT_EQ(::read(answers_[0], &holder, sizeof(holder)), static_cast<ssize_t>(sizeof(holder)));
    return holder;
  }
  void send_answer() {
    const pid_t own = ::getpid();
    EXPECT_EQ(::write(answers_[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
  }
  /// Serves until both ranks have finished.
  void serve() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.waitWorkers = false;
    options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
    c10d::TCPStore store("127.0.0.1", options);
    send_answer();
    send_answer();
    int running = 2;
    for (char order = 0; running > 0 && ::read(orders_[0], &order, 1) == 1;) {
      for (const std::string& key : store.listKeys()) {
        // With and without its clients' prefix.
        if (order == kEmpty) store.deleteKey(key), store.deleteKey(key.substr(1));
      }
      if (order == kThrough) {
        --running;  // gets no answer: another rank may be waiting for one
        continue;
      }
      send_answer();
      if (order == kStop) ::raise(SIGSTOP);
    }
  }

  static constexpr char kEmpty = 'e';
  static constexpr char kStop = 's';
  static constexpr char kThrough = 't';
  int orders_[2];
  int answers_[2];
};

// A launcher empties its store between attempts.
TEST(RendezvousTest, ARankLeavesThoughItsStoreWasEmptied) {
  AgentStore store;
  store.run([&](int rank) {
    if (rank == 0) store.empty();
    dist::barrier();
    dist::destroy_process_group();
  });
}

TEST(RendezvousTest, AnErrorIsReportedThoughTheStoreDoesNotAnswer) {
  AgentStore store;
  store.run([&](int rank) {
    if (rank != 0) return dist::barrier();
    dist::barrier();
    const pid_t holder = store.stop();
    const auto train = [] {
      struct Group {
        ~Group() { dist::destroy_process_group(); }
      } const group;
      throw UserError("the loss is nan");
    };
    EXPECT_THAT(message_of<UserError>(train), HasSubstr("the loss is nan"));
    ::kill(holder, SIGCONT);
  });
}

// c10d waits for answers without a deadline. The deadline is for hosts that are gone, see
// MonitorLinkTest.AHostThatIsGoneIsGivenUpAfterElevenSeconds.
TEST(RendezvousTest, AnswersOfTheStoreHaveADeadline) {
  AgentStore store;
  store.run([](int) {
    int bounded = 0;
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_storage address{};
      socklen_t size = sizeof(address);
      if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
      if (syncbn::base::port_of(address) != std::atoi(std::getenv("MASTER_PORT"))) continue;
      unsigned unanswered = 0;
      timeval answer{};
      size = sizeof(unanswered);
      EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, &size), 0);
      EXPECT_EQ(unanswered, 11'000U);
      size = sizeof(answer);
      EXPECT_EQ(::getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &answer, &size), 0);
      EXPECT_EQ(answer.tv_sec, 60);
      ++bounded;
    }
    EXPECT_EQ(bounded, 1);
  });
}

TEST(RendezvousTest, NobodyAtTheMasterAddressIsSaidAfterTheTimeout) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("RANK", "1", 1);
    const std::string message = message_of<UnavailableError>(
        [] { dist::init_process_group({.connect_timeout = milliseconds(300)}); });
    EXPECT_THAT(message, AllOf(HasSubstr("nobody answered"), HasSubstr(std::getenv("MASTER_PORT")),
                               HasSubstr("refused")));
  });
}

// A connection alone proves nothing: c10d's client would wait for an answer forever.
TEST(RendezvousTest, AForeignProgramAtThePortIsNoStore) {
  run_ranks(1, [](int) {
    const Listener silent(std::atoi(std::getenv("MASTER_PORT")));
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("RANK", "1", 1);
    const std::string message = message_of<UnavailableError>(
        [] { dist::init_process_group({.connect_timeout = milliseconds(300)}); });
    EXPECT_THAT(message, HasSubstr("does not answer as a store"));
  });
}

TEST(RendezvousTest, ARankOfAnotherJobIsTurnedAwayAndTheJobGoesOn) {
  int turned_away[2];
  ASSERT_EQ(::pipe(turned_away), 0);
  const auto results = run_ranks_and_collect({.world_size = 3}, [&](int rank) {
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("TORCHELASTIC_RUN_ID", rank == 2 ? "stranger" : "ours", 1);
    if (rank == 2) {
      ::setenv("RANK", "1", 1);
      EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                  HasSubstr("rank 1 of job 'stranger' found another job, 'ours'"));
      ASSERT_EQ(::write(turned_away[1], "12", 2), 2);
      return;
    }
    dist::init_process_group();
    // The store has to exist until the stranger was turned away.
    char byte = 0;
    ASSERT_EQ(::read(turned_away[0], &byte, 1), 1);
    dist::barrier();
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(RendezvousTest, AMissingRankIsNamed) {
  run_ranks(2, [](int rank) {
    ::setenv("WORLD_SIZE", "3", 1);
    const std::string message = message_of<UnavailableError>(
        [] { dist::init_process_group({.connect_timeout = milliseconds(5000)}); });
    // Rank 0 holds the store: if it gives up first, the other one finds no store.
    if (rank == 0) {
      EXPECT_THAT(message, HasSubstr("waited 5.0 s for rank 2,"));
    }
  });
}

/// Every process must have been refused with these words. The connect timeout cannot be the reason:
/// it is longer than run_ranks_and_collect() waits.
void expect_all_told(const std::vector<RankResult>& results, int rank,
                     const std::string& first = "host .* .pid [0-9]+.") {
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, syncbn::base::kExitUsage) << result.output;
    EXPECT_THAT(
        result.output,
        AllOf(ContainsRegex(fmt::format("rank {} was claimed by two processes: on {} and host "
                                        "{} .pid [0-9]+.;",
                                        rank, first, syncbn::base::hostname())),
              HasSubstr("passes LOCAL_RANK for the rank")));
  }
}

TEST(RendezvousTest, ARankThatTwoProcessesClaimIsToldToAllAtOnce) {
  for (const int claimed : {0, 1}) {
    const auto results = run_ranks_and_collect({.world_size = 3}, [claimed](int rank) {
      if (rank == 2) ::setenv("RANK", std::to_string(claimed).c_str(), 1);
      dist::init_process_group();
    });
    expect_all_told(results, claimed);
  }
}

// Rank 1 gives up twice: before the store exists, and while it waits for rank 2.
TEST(RendezvousTest, ARankThatGaveUpCanComeAgain) {
  int no_store[2];
  int waited[2];
  ASSERT_EQ(::pipe(no_store), 0);
  ASSERT_EQ(::pipe(waited), 0);
  run_ranks(3, [&](int rank) {
    char byte = 0;
    if (rank != 1) {
      ASSERT_EQ(::read(rank == 0 ? no_store[0] : waited[0], &byte, 1), 1);
    }
    if (rank == 1) {
      EXPECT_THROW(dist::init_process_group({.connect_timeout = milliseconds(100)}),
                   UnavailableError);
      ASSERT_EQ(::write(no_store[1], "0", 1), 1);
      EXPECT_THROW(dist::init_process_group({.connect_timeout = milliseconds(1500)}),
                   UnavailableError);
      ASSERT_EQ(::write(waited[1], "2", 1), 1);
    }
    dist::init_process_group();
    EXPECT_EQ(dist::world_size(), 3);
    dist::barrier();
  });
}

TEST(RendezvousTest, APortThatAnotherProgramHoldsIsNamed) {
  run_ranks(1, [](int) {
    const Listener silent(std::atoi(std::getenv("MASTER_PORT")));
    ::setenv("WORLD_SIZE", "2", 1);
    EXPECT_THAT(message_of<UnavailableError>([] { dist::init_process_group(); }),
                AllOf(HasSubstr("cannot listen on 127.0.0.1:"), HasSubstr("another program")));
  });
}

TEST(RendezvousTest, RankZeroOfAnotherJobIsTurnedAway) {
  int formed[2];
  int turned_away[2];
  ASSERT_EQ(::pipe(formed), 0);
  ASSERT_EQ(::pipe(turned_away), 0);
  const auto results = run_ranks_and_collect({.world_size = 3}, [&](int rank) {
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("TORCHELASTIC_RUN_ID", rank == 2 ? "stranger" : "ours", 1);
    char byte = 0;
    if (rank == 2) {
      ::setenv("RANK", "0", 1);
      ASSERT_EQ(::read(formed[0], &byte, 1), 1);
      EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                  HasSubstr("rank 0 of job 'stranger' found another job, 'ours'"));
      ASSERT_EQ(::write(turned_away[1], "0", 1), 1);
      return;
    }
    dist::init_process_group();
    if (rank == 0) {
      ASSERT_EQ(::write(formed[1], "2", 1), 1);
      ASSERT_EQ(::read(turned_away[0], &byte, 1), 1);
    }
    expect_sum_of_two(rank);
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

// Rank 1 is one of Python's, as far as its key in the store tells; rank 2 does not arrive.
TEST(RendezvousTest, ARankThatAPythonProcessHasIsToldToOurs) {
  int has_key[2];
  ASSERT_EQ(::pipe(has_key), 0);
  const auto results = run_ranks_and_collect({.world_size = 2}, [&](int rank) {
    ::setenv("WORLD_SIZE", "3", 1);
    char byte = 0;
    if (rank == 0 && ::fork() == 0) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
      c10d::TCPStore("127.0.0.1", options).set(gloo_key(1), std::vector<uint8_t>{1});
      std::_Exit(::write(has_key[1], "1", 1) == 1 ? 0 : 1);
    }
    if (rank == 1) {
      ASSERT_EQ(::read(has_key[0], &byte, 1), 1);
    }
    dist::init_process_group();
  });
  expect_all_told(results, 1, "an unknown host .Python's torch.distributed.");
}

TEST(RendezvousTest, TimeoutsMustBeAboveZero) {
  for (const milliseconds time : {milliseconds(0), milliseconds(-5)}) {
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.timeout = time}); }),
                HasSubstr("InitOptions::timeout must be above zero"));
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.connect_timeout = time}); }),
                HasSubstr("InitOptions::connect_timeout must be above zero"));
  }
  run_group(1, [](int) {
    EXPECT_THAT(message_of<UserError>([] { dist::new_group({0}, milliseconds(0)); }),
                HasSubstr("timeout must be above zero"));
  });
}

TEST(InterfaceTest, OneThatIsNotThereIsNamedWithThoseThatAre) {
  run_ranks(1, [](int) {
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group({.interface = "eth77"}); }),
                AllOf(HasSubstr("InitOptions::interface names the network interface 'eth77'"),
                      HasSubstr("it has lo")));
    ::setenv("GLOO_SOCKET_IFNAME", "lo,eth78", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                HasSubstr("GLOO_SOCKET_IFNAME names the network interface 'eth78'"));
  });
}

/// The addresses on which this process listens.
std::set<std::string> listening_at() {
  std::set<std::string> addresses;
  for (int fd = 0; fd < 1024; ++fd) {
    int accepts = 0;
    socklen_t size = sizeof(accepts);
    sockaddr_storage address{};
    socklen_t address_size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0 || accepts == 0 ||
        ::getsockname(fd, generic, &address_size) != 0) {
      continue;
    }
    addresses.insert(syncbn::base::numeric_address(generic, address_size));
  }
  return addresses;
}

// The store on rank 0 and Gloo on both listen on the interface that leads to the master, not on
// loopback or on all interfaces.
TEST(InterfaceTest, RanksListenOnTheWayToTheMasterAlone) {
  const std::string outside = dist::detail::outside_address();
  SYNCBN_SKIP_UNLESS(!outside.empty(), "network");
  run_ranks(2, [&](int rank) {
    ::setenv("MASTER_ADDR", outside.c_str(), 1);
    dist::init_process_group();
    EXPECT_THAT(listening_at(), ElementsAre(outside));
    expect_sum_of_two(rank);
  });
}

TEST(InterfaceTest, TheOptionGoesBeforeTheEnvironment) {
  const std::string outside = dist::detail::outside_address();
  SYNCBN_SKIP_UNLESS(!outside.empty(), "network");
  run_ranks(2, [&](int rank) {
    ::setenv("MASTER_ADDR", outside.c_str(), 1);
    ::setenv("GLOO_SOCKET_IFNAME", "eth78", 1);
    dist::init_process_group({.interface = "lo"});
    if (rank == 1) {
      EXPECT_THAT(listening_at(), ElementsAre("127.0.0.1"));
    }
    expect_sum_of_two(rank);
  });
}

// As in PyTorch: one mesh per interface.
TEST(InterfaceTest, TheEnvironmentMayNameSeveral) {
  run_ranks(2, [](int rank) {
    ::setenv("GLOO_SOCKET_IFNAME", "lo,lo", 1);
    dist::init_process_group();
    expect_sum_of_two(rank);
  });
}

TEST(InterfaceTest, NcclIsToldUnlessTheUserHasSaidIt) {
  run_ranks(1, [](int) {
    ::unsetenv("NCCL_SOCKET_IFNAME");
    dist::detail::set_nccl_environment("");
    EXPECT_EQ(std::getenv("NCCL_SOCKET_IFNAME"), nullptr);
    dist::detail::set_nccl_environment("eth1");
    EXPECT_STREQ(std::getenv("NCCL_SOCKET_IFNAME"), "=eth1");
    dist::detail::set_nccl_environment("eth2");
    EXPECT_STREQ(std::getenv("NCCL_SOCKET_IFNAME"), "=eth1");
  });
}

TEST(InterfaceTest, IPv6ByTheEnvironmentAndByUrl) {
  SYNCBN_SKIP_UNLESS(std::filesystem::exists("/proc/net/if_inet6"), "ipv6");
  run_ranks(2, [](int rank) {
    ::setenv("MASTER_ADDR", "::1", 1);
    dist::init_process_group();
    expect_sum_of_two(rank);
    dist::destroy_process_group();
    const std::string port = std::getenv("MASTER_PORT");
    dist::init_process_group({.init_method = "tcp://[::1]:" + port});
    expect_sum_of_two(rank);
  });
}

}  // namespace

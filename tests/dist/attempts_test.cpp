// How ranks meet in a store that an agent keeps while it restarts them. This test is the agent.
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rendezvous/arrival.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/temp_folder.h"

namespace syncbn::test {
namespace {

class AttemptsTest : public ::testing::Test {
 protected:
  AttemptsTest() {
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(port_).c_str(), 1);
    ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    holder_ = fork_and_run([this] {
      c10d::TCPStoreOptions options;
      options.isServer = true;
      options.waitWorkers = false;
      options.port = static_cast<uint16_t>(port_);
      const c10d::TCPStore store("127.0.0.1", options);
      for (;;) ::pause();
    });
  }
  ~AttemptsTest() override { kill(holder_); }

  /// Starts a rank that joins `groups` default groups, one after the other, and checks a sum.
  pid_t start(int rank, int world_size, const std::vector<std::string>& groups = {"env://"}) {
    return fork_and_run([=] {
      ::setenv("RANK", std::to_string(rank).c_str(), 1);
      ::setenv("WORLD_SIZE", std::to_string(world_size).c_str(), 1);
      for (const std::string& method : groups) {
        dist::init_process_group(
            {.init_method = method, .connect_timeout = std::chrono::seconds(60)});
        at::Tensor sum = at::ones({1});
        dist::all_reduce(sum);
        if (sum.item<float>() != static_cast<float>(world_size)) ::_exit(1);
        dist::destroy_process_group();
      }
    });
  }

  /// Waits until a process has arrived as a rank, in either of the first two attempts.
  void wait_for(int rank, pid_t process) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port_);
    c10d::TCPStore store("127.0.0.1", options);
    const std::string id = "-" + std::to_string(process) + "|";
    EXPECT_TRUE(eventually([&] {
      for (const std::string prefix : {"", "attempt-2/"}) {
        const std::string key = prefix + "syncbn/arrived/" + std::to_string(rank);
        if (!store.check({key})) continue;
        const auto value = store.get(key);
        if (std::string(value.begin(), value.end()).find(id) != std::string::npos) return true;
      }
      return false;
    }));
  }

  static void kill(pid_t process) {
    ::kill(process, SIGKILL);
    ::waitpid(process, nullptr, 0);
  }

  static void expect_success(const std::vector<pid_t>& ranks) {
    for (const pid_t rank : ranks) {
      int status = -1;
      EXPECT_EQ(::waitpid(rank, &status, 0), rank);
      EXPECT_EQ(status, 0);
    }
  }

  /// Ranks 0 and 1 of three arrive, and one of them is killed and started again before rank 2
  /// comes.
  void expect_success_after_restart_of(int rank) {
    std::vector<pid_t> ranks{start(0, 3), start(1, 3)};
    wait_for(0, ranks[0]);
    wait_for(1, ranks[1]);
    pid_t& restarted = ranks[static_cast<size_t>(rank)];
    kill(restarted);
    restarted = start(rank, 3);
    wait_for(rank, restarted);
    ranks.push_back(start(2, 3));
    expect_success(ranks);
  }

 private:
  template <class Body>
  static pid_t fork_and_run(const Body& body) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(2);
    }
    ::_exit(0);
  }

  const int port_ = free_port();
  pid_t holder_ = -1;
};

TEST_F(AttemptsTest, RanksThatAreStartedAgainMeetAgain) {
  for (int attempt = 0; attempt < 3; ++attempt) expect_success({start(0, 2), start(1, 2)});
}

TEST_F(AttemptsTest, RanksFollowRankZeroThatWasStartedAgain) {
  expect_success_after_restart_of(0);
}

// As with torchrun's static rendezvous: the node of rank 0 does not know that others were
// restarted.
TEST_F(AttemptsTest, ARankTakesThePlaceOfOneThatEndedBeforeAllHadArrived) {
  expect_success_after_restart_of(1);
}

// Rank 0 must not decide on the arrival of a process that has ended.
TEST_F(AttemptsTest, TheLastRankMayComeBeforeARestartedOne) {
  std::vector<pid_t> ranks{start(0, 3), start(1, 3)};
  wait_for(0, ranks[0]);
  wait_for(1, ranks[1]);
  kill(ranks[1]);
  ranks.push_back(start(2, 3));
  wait_for(2, ranks[2]);
  ranks[1] = start(1, 3);
  expect_success(ranks);
}

// As it died before it had begun an attempt, the next one has the same number.
TEST_F(AttemptsTest, RankZeroMayHaveDiedBeforeItWasThere) {
  const pid_t waits = start(1, 2);
  wait_for(1, waits);
  kill(waits);
  std::vector<pid_t> ranks{start(0, 2)};
  wait_for(0, ranks[0]);
  ranks.push_back(start(1, 2));
  expect_success(ranks);
}

// A node has joined: all its ranks are new, and may be there before rank 0 begins.
TEST_F(AttemptsTest, ARankThatIsNewWaitsForRankZeroToBegin) {
  expect_success({start(0, 2), start(1, 2)});
  const pid_t joined = start(2, 3);
  wait_for(2, joined);
  expect_success({joined, start(0, 3), start(1, 3)});
}

TEST_F(AttemptsTest, AProcessComesBackToAStoreAfterAnother) {
  const TempFolder folder;
  const std::string file = "file://" + (folder / "store").string();
  const std::vector<std::string> groups{"env://", file, "env://", "env://"};
  expect_success({start(0, 2, groups), start(1, 2, groups)});
}

/// A store in which rank 0 decides as soon as rank 1 has arrived.
class DecidingStore : public c10d::HashStore {
 public:
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    auto now = HashStore::compareSet(key, expected, desired);
    if (key == "syncbn/arrived/1") c10d::Store::set("syncbn/backend", "gloo");
    return now;
  }
};

TEST(ArriveTest, TheLastRankBelongsToTheAttemptThatItCompletes) {
  DecidingStore store;
  static_cast<c10d::Store&>(store).set("syncbn/arrived/0", "gloo|none|process|network|host");
  dist::detail::Place place;
  place.rank = 1;
  place.world_size = 2;
  place.agent_holds_store = place.is_elastic = true;
  const auto arrived = dist::detail::arrive(
      store, place, {.rank = 1, .backend = "gloo", .gpu = "none", .where = "host"},
      /*holds_store=*/false, std::chrono::steady_clock::now() + std::chrono::seconds(10),
      std::chrono::milliseconds(10'000), [] { return false; });
  ASSERT_TRUE(arrived);
  EXPECT_EQ(arrived->choice.backend, "gloo");
}

}  // namespace
}  // namespace syncbn::test

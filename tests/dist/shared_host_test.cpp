// Which ranks share memory, on one host and on several, and what happens when ranks die.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dist/group.h"
#include "dist/hosts.h"
#include "dist/shared_calls.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/thrown.h"
#include "transport/handshake.h"

namespace syncbn::test {
namespace {

using at::Tensor;
using base::UnavailableError;
using base::UserError;
using c10d::ReduceOp;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(SharedHostTest, OneRankTurnsItOffForAll) {
  run_ranks(3, [](int rank) {
    dist::init_process_group({.shared_memory = rank != 1});
    expect_works(false);
    // A group without rank 1 still shares memory.
    const auto others = dist::new_group({0, 2});
    EXPECT_TRUE(!others || backend(others).shares_memory());
  });
}

TEST(SharedHostTest, TheEnvironmentTurnsItOff) {
  run_ranks(2, [](int rank) {
    if (rank == 1) ::setenv("SYNCBN_SHARED_MEMORY", "0", 1);
    dist::init_process_group();
    expect_works(false);
  });
  run_ranks(1, [](int) {
    ::setenv("SYNCBN_SHARED_MEMORY", "off", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                AllOf(HasSubstr("SYNCBN_SHARED_MEMORY"), HasSubstr("off")));
  });
}

TEST(SharedHostTest, ARankWithoutTheMemoryTurnsItOffForAllUnlessItIsAskedFor) {
  for (const bool asked : {false, true}) {
    run_ranks(2, [asked](int rank) {
      const rlimit limit{.rlim_cur = 64 << 10, .rlim_max = 64 << 10};
      ASSERT_TRUE(rank == 0 || ::setrlimit(RLIMIT_FSIZE, &limit) == 0);
      if (asked) {
        ::setenv("SYNCBN_SHARED_MEMORY", "1", 1);
        const auto refused =
            HasSubstr("SYNCBN_SHARED_MEMORY=1, and the ranks of this host do not share");
        const std::string message = message_of<base::Error>([] { dist::init_process_group(); });
        // The first rank to fail may be gone while the other one is still connecting.
        EXPECT_THAT(message, AnyOf(refused, HasSubstr("has left the group")));
        return;
      }
      dist::init_process_group();
      expect_works(false);
    });
  }
}

/// The key of a rank's handshake in the store, for a build of this version.
std::string handshake_key(int version, int rank) {
  return fmt::format("syncbn/shared-memory/{}/{}", version, rank);
}

/// This build's version, from the key that rank 0 has set.
std::optional<int> version_in(c10d::Store& store) {
  for (int version = 0; version < 100; ++version) {
    if (store.check({handshake_key(version, 0)})) return version;
  }
  return std::nullopt;
}

// A rank must not wait for a key that another build never sets: it would end with an exception.
TEST(SharedHostTest, AHandshakeOfAnotherBuildTurnsItOffForAll) {
  c10d::HashStore memory;
  c10d::Store& store = memory;
  const auto handshake = dist::detail::shm::Handshake::start(store, 0, 2);
  ASSERT_TRUE(handshake.has_value());
  EXPECT_FALSE(handshake->is_started_by_all(store)) << "rank 1 has not started";
  const std::optional<int> version = version_in(store);
  ASSERT_TRUE(version.has_value()) << "this test expects another key";
  for (const int other : {*version - 1, *version + 1}) {
    store.set(handshake_key(other, 1), "yes");
    EXPECT_FALSE(handshake->is_started_by_all(store)) << other;
  }
  const auto equal = dist::detail::shm::Handshake::start(store, 1, 2);
  ASSERT_TRUE(equal.has_value());
  EXPECT_TRUE(handshake->is_started_by_all(store));
  EXPECT_TRUE(equal->is_started_by_all(store));
}

// Like /dev/shm in containers, but smaller.
TEST(SharedHostTest, DevShmMayBeTiny) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks(2, [](int) {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    ASSERT_EQ(::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4096"), 0);
    dist::init_process_group();
    expect_works(true);
  });
}

// As in two containers: the host name, the network and the boot ID are the same.
TEST(SharedHostTest, RanksThatDoNotSeeEachOthersProcessesUseGloo) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks(2, [](int rank) {
    ASSERT_TRUE(rank == 0 || ::unshare(CLONE_NEWPID) == 0);
    const pid_t child = ::fork();
    if (child != 0) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      return;
    }
    dist::init_process_group();
    expect_works(false);
    dist::barrier();
    std::quick_exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

TEST(SharedHostTest, HostsMeetOverGloo) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks_on_hosts({2, 2}, [](int rank) {
    reduce_everything(rank);
    average_everything(rank);
    gather_everything(rank);
    broadcast_everything(rank);
    dist::barrier();
    expect_all_shared();
    // One rank on each host; two on one host and one on the other; two on the same host.
    for (const auto& [ranks, shared] :
         {std::pair(std::vector<int>{3, 1}, false), std::pair(std::vector<int>{2, 0, 1}, true),
          std::pair(std::vector<int>{3, 2}, true)}) {
      const auto group = dist::new_group(ranks);
      if (!group) continue;
      Tensor sum = at::full({100'000}, rank + 1.0);
      dist::all_reduce(sum, ReduceOp::SUM, group);
      const double expected = std::accumulate(ranks.begin(), ranks.end(), 0.0);
      EXPECT_TRUE(sum.equal(at::full({100'000}, expected + static_cast<double>(ranks.size()))));
      EXPECT_EQ(backend(group).shares_memory(), shared);
    }
  });
}

TEST(SharedHostTest, AsynchronousCallsSpanHosts) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks_on_hosts({2, 2}, [](int rank) {
    std::vector<Tensor> sums;
    std::vector<dist::WorkPtr> works;
    std::vector<dist::WorkPtr> bytes;
    for (int i = 0; i < 8; ++i) {
      sums.push_back(at::full({100'000}, rank + i, at::kFloat));
      works.push_back(dist::all_reduce_async(sums.back()));
      if (i % 3 == 0) bytes.push_back(dist::all_gather_bytes_async(std::to_string(rank)));
    }
    const auto gathered = dist::all_gather_async(at::full({3}, rank));
    // The leaders wait for the last call first, the others for the first call.
    for (int i = 0; i < 8; ++i) works[static_cast<size_t>(rank % 2 == 0 ? 7 - i : i)]->wait();
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(sums[static_cast<size_t>(i)].equal(at::full({100'000}, 6.0F + 4.0F * i)));
    }
    EXPECT_TRUE(gathered->tensors().at(3).equal(at::full({3}, 3)));
    for (const auto& work : bytes) {
      EXPECT_EQ(work->bytes(), (std::vector<std::string>{"0", "1", "2", "3"}));
    }
    const auto dropped = dist::all_reduce_async(sums[0]);
    EXPECT_FALSE(dropped->exception());
  });
}

TEST(SharedHostTest, ADeadRankOfAnotherHostIsNamed) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  for (const int dead : {1, 2}) {
    run_ranks_on_hosts({2, 2}, [dead](int rank) {
      expect_works(true);
      if (rank == dead) ::_exit(0);
      EXPECT_THAT(message_of<UnavailableError>([] { expect_works(true); }),
                  AllOf(HasSubstr("all_reduce #2 of group '0' failed"),
                        HasSubstr(fmt::format("rank {} (", dead)), HasSubstr(") died")));
    });
  }
}

// The group's own timeout is half an hour.
TEST(SharedHostTest, ATimeoutOfOneCallHoldsForTheLeadersOfHosts) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  struct Progress {
    std::atomic<bool> was_alone;
    std::atomic<int> waited;  // number of ranks
  };
  void* const shared =
      ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const progress = new (shared) Progress{};
  const auto wait_until = [](auto condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  };
  run_ranks_on_hosts({2, 2}, [&](int rank) {
    expect_works(true);
    const auto group = dist::new_group({2, 0, 1});
    Tensor tensor = at::ones({3});
    // Rank 2 is alone on its host.
    if (rank == 2) {
      EXPECT_THAT(message_of<UnavailableError>([&] {
                    dist::all_reduce(tensor, ReduceOp::SUM, group, std::chrono::seconds(1));
                  }),
                  AllOf(HasSubstr("all_reduce #1 of group '1' failed"), HasSubstr("imed out")));
      progress->was_alone = true;
    } else {
      wait_until([&] { return progress->was_alone.load(); });
    }
    // A leader and a rank that waits for it; the only timeout is that of wait().
    if (rank < 2) {
      Tensors tensors{tensor};
      const auto work = dist::default_group()->allreduce(tensors);
      EXPECT_THAT(
          message_of<UnavailableError>([&] { work->wait(std::chrono::milliseconds(1000)); }),
          HasSubstr("timed out after 1000ms"));
      ++progress->waited;
    }
    wait_until([&] { return progress->waited == 2; });
    dist::destroy_process_group();
  });
}

TEST(SharedHostTest, WorksAgainAfterAllWereKilled) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    if (rank == 1) ::alarm(60);
    dist::init_process_group();
    expect_works(true);
    ::raise(SIGKILL);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, base::kExitSignalBase + SIGKILL) << result.output;
  }
  run_group(2, [](int) { expect_works(true); });
}

}  // namespace
}  // namespace syncbn::test

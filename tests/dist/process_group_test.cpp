#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include "support/listener.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::Listener;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// The message of the Exception that `body` throws; a failure when it throws none.
template <class Exception, class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

at::Tensor value_of(int rank) {
  return at::full({2, 3}, rank + 1.0);
}

TEST(ProcessGroupTest, WithoutALauncherIsAWorldOfOne) {
  run_ranks(1, [](int) {
    ::unsetenv("RANK");
    ::unsetenv("WORLD_SIZE");
    dist::init_process_group();
    EXPECT_EQ(dist::rank(), 0);
    EXPECT_EQ(dist::world_size(), 1);
    at::Tensor tensor = value_of(4);
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(value_of(4)));
    dist::destroy_process_group();
    EXPECT_FALSE(dist::is_initialized());
  });
}

TEST(ProcessGroupTest, UseBeforeInitNamesInitProcessGroup) {
  EXPECT_THAT(message_of<UserError>([] { dist::barrier(); }), HasSubstr("init_process_group"));
}

TEST(ProcessGroupTest, AllReduceSumsOverFourRanks) {
  run_ranks(4, [](int rank) {
    dist::init_process_group({.backend = "gloo"});
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, 10.0)));
    at::Tensor largest = value_of(rank);
    dist::all_reduce(largest, c10d::ReduceOp::MAX);
    EXPECT_TRUE(largest.equal(value_of(3)));
  });
}

TEST(ProcessGroupTest, CollectivesTakeTensorsOfAnyStrides) {
  run_ranks(2, [](int rank) {
    dist::init_process_group({.backend = "gloo"});
    at::Tensor whole = at::full({3, 4}, rank + 1.0);
    at::Tensor column = whole.select(1, 2);
    dist::all_reduce(column);
    EXPECT_TRUE(column.equal(at::full({3}, 3.0)));
    EXPECT_EQ(whole[0][0].item<double>(), rank + 1.0) << "the rest is left alone";
    at::Tensor transposed = at::full({2, 3}, static_cast<double>(rank)).t();
    dist::broadcast(transposed, 1);
    EXPECT_TRUE(transposed.equal(at::ones({3, 2})));
  });
}

TEST(ProcessGroupTest, AllGatherKeepsTheOrderOfRanks) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto all = dist::all_gather(value_of(rank));
    ASSERT_EQ(all.size(), 3u);
    for (int other = 0; other < 3; ++other) {
      EXPECT_TRUE(all[static_cast<size_t>(other)].equal(value_of(other)));
    }
  });
}

TEST(ProcessGroupTest, BroadcastBytesNeedsNoLengthOnTheOtherRanks) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    const std::string sent("a\0b", 3);
    EXPECT_EQ(dist::broadcast_bytes(rank == 1 ? sent : "", 1), sent);
    EXPECT_EQ(dist::broadcast_bytes("", 0), "");
  });
}

TEST(ProcessGroupTest, NewGroupIsNullOutsideAndKeepsTheOrderGiven) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_group({2, 0});
    if (rank == 1) {
      EXPECT_FALSE(group);
      return;
    }
    EXPECT_EQ(dist::rank(group), rank == 2 ? 0 : 1);
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, group);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, 4.0)));
  });
}

TEST(ProcessGroupTest, NewSubgroupsSplitsIntoNeighbours) {
  run_ranks(4, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_subgroups(2);
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, group);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, rank < 2 ? 3.0 : 7.0)));
    EXPECT_THAT(message_of<UserError>([] { dist::new_subgroups(3); }), HasSubstr("groups of 3"));
  });
}

TEST(ProcessGroupTest, NewGroupRefusesRanksThatAreNotThere) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    EXPECT_THAT(message_of<UserError>([] { dist::new_group({0, 2}); }), HasSubstr("rank 2"));
    EXPECT_THAT(message_of<UserError>([] { dist::new_group({1, 1}); }), HasSubstr("twice"));
  });
}

TEST(ProcessGroupTest, GroupsCanBeFormedAgainAfterDestroy) {
  run_ranks(2, [](int rank) {
    for (int round = 0; round < 2; ++round) {
      dist::init_process_group();
      at::Tensor tensor = value_of(rank);
      dist::all_reduce(tensor);
      EXPECT_TRUE(tensor.equal(at::full({2, 3}, 3.0)));
      dist::barrier();
      // The other rank may meet the store that this one still holds.
      if (rank == 0) ::usleep(100'000);
      dist::destroy_process_group();
    }
  });
}

TEST(ProcessGroupTest, InitTwiceIsRefused) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }), HasSubstr("twice"));
  });
}

TEST(ProcessGroupTest, TcpUrlTakesRankAndWorldSizeFromTheOptions) {
  const int port = syncbn::test::free_port();
  const auto results = run_ranks_and_collect({.set_master = false}, [port](int rank) {
    ::unsetenv("RANK");
    ::unsetenv("WORLD_SIZE");
    dist::init_process_group(
        {.init_method = "tcp://127.0.0.1:" + std::to_string(port), .rank = rank, .world_size = 2});
    EXPECT_EQ(dist::world_size(), 2);
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
  EXPECT_THAT(message_of<UserError>([] { dist::init_process_group({.backend = "glo"}); }),
              HasSubstr("'glo'"));
  EXPECT_THAT(message_of<UserError>([] { dist::init_process_group({.init_method = "udp://x:1"}); }),
              HasSubstr("udp://x:1"));
  for (const char* url : {"tcp://h:123abc", "tcp://h", "tcp://h:0"}) {
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.init_method = url}); }),
                HasSubstr(std::string(url) + "' is not tcp://host:port"));
  }
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

// A connection alone proves nothing: c10d's own client would wait for its answer for ever.
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
    // The store has to be there for as long as the stranger comes.
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
        [] { dist::init_process_group({.connect_timeout = milliseconds(1000)}); });
    // Rank 0 holds the store: when it gives up first, the other one finds the store gone.
    if (rank == 0) {
      EXPECT_THAT(message, HasSubstr("waited 1.0 s for rank 2,"));
    }
  });
}

TEST(RendezvousTest, TwoProcessesWithOneRankAreBothTold) {
  const auto results = run_ranks_and_collect({.world_size = 3}, [](int rank) {
    if (rank == 2) ::setenv("RANK", "1", 1);
    dist::init_process_group({.connect_timeout = std::chrono::seconds(10)});
  });
  int told = 0;
  for (const auto& result : results) {
    EXPECT_NE(result.exit_code, 0);
    told += result.output.find("two processes have rank 1") != std::string::npos;
  }
  EXPECT_GE(told, 2);
}

// Rank 1 gives up twice: before there is a store, and while it waits for rank 2.
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

TEST(RendezvousTest, ATakenPortIsNamed) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    ::setenv("RANK", "0", 1);  // both want to hold the store
    if (rank == 1) ::usleep(300'000);
    dist::init_process_group({.connect_timeout = milliseconds(1500)});
  });
  EXPECT_EQ(results[1].exit_code, syncbn::base::kExitUnavailable);
  EXPECT_THAT(results[1].output, AllOf(HasSubstr("cannot listen on 127.0.0.1:"),
                                       HasSubstr("two workers have rank 0")));
}

TEST(FaultTest, AKilledPeerEndsACollectiveWithItsName) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    dist::init_process_group();
    dist::barrier();
    if (rank == 1) ::raise(SIGKILL);
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor);
  });
  EXPECT_EQ(results[1].exit_code, syncbn::base::kExitSignalBase + SIGKILL);
  EXPECT_EQ(results[0].exit_code, syncbn::base::kExitUnavailable);
  EXPECT_THAT(results[0].output,
              AllOf(HasSubstr("rank 0 of 2"), HasSubstr("all_reduce #2 of group '0' failed")));
}

TEST(FaultTest, AStuckPeerEndsACollectiveAfterTheTimeout) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    dist::init_process_group({.timeout = milliseconds(1500)});
    dist::barrier();
    if (rank == 1) {
      ::usleep(4'000'000);  // longer than the timeout, which the message must name
      return;
    }
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor);
  });
  EXPECT_EQ(results[0].exit_code, syncbn::base::kExitUnavailable) << results[0].output;
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("all_reduce"), HasSubstr("1500ms")));
}

TEST(ProcessGroupTest, RefusedArgumentsAreTheCallersMistake) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    std::vector<at::Tensor> unequal{at::ones({2}), at::ones({3})};
    EXPECT_THAT(message_of<UserError>([&] { dist::default_group()->allreduce(unequal); }),
                HasSubstr("all_reduce #1 of group '0' was refused"));
  });
}

}  // namespace

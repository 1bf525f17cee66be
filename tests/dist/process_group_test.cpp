#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dist/group.h"
#include "groups/world.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using std::chrono::milliseconds;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

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

TEST(ProcessGroupTest, CollectivesTakeTensorsOfAnyStrides) {
  run_group(2, {.backend = "gloo"}, [](int rank) {
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

TEST(ProcessGroupTest, NewGroupIsNullOutsideAndKeepsTheOrderGiven) {
  run_group(3, [](int rank) {
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

TEST(ProcessGroupTest, TheNullOfARankOutsideIsNotTheDefaultGroup) {
  run_group(2, [](int rank) {
    const dist::ProcessGroupPtr null;
    EXPECT_EQ(dist::world_size(null), 2);  // no group without this rank exists yet
    dist::new_subgroups(1);
    EXPECT_EQ(dist::world_size(null), 2);
    const auto group = dist::new_group({0});
    if (rank == 1) {
      at::Tensor tensor = value_of(rank);
      const auto is_refused =
          HasSubstr("the process group is null on this rank, because new_group()");
      EXPECT_THAT(
          message_of<UserError>([&] { dist::all_reduce(tensor, c10d::ReduceOp::SUM, group); }),
          is_refused);
      EXPECT_THAT(message_of<UserError>([&] { dist::isend(tensor, 0, group); }), is_refused);
      EXPECT_THAT(message_of<UserError>([&] { dist::rank(group); }), is_refused);
      EXPECT_THAT(message_of<UserError>([&] { dist::DdpOptions{.process_group = group}; }),
                  is_refused);
    }
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, {});
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, 3.0)));
    dist::barrier(nullptr);
  });
}

TEST(ProcessGroupTest, NewSubgroupsSplitsIntoNeighbours) {
  run_group(4, [](int rank) {
    const auto group = dist::new_subgroups(2);
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, group);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, rank < 2 ? 3.0 : 7.0)));
    EXPECT_THAT(message_of<UserError>([] { dist::new_subgroups(3); }), HasSubstr("groups of 3"));
  });
}

TEST(ProcessGroupTest, NewGroupRefusesRanksThatAreNotThere) {
  run_group(2, [](int) {
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
      // The other rank may connect to the store that this rank still holds.
      if (rank == 0) ::usleep(100'000);
      dist::destroy_process_group();
    }
  });
}

TEST(ProcessGroupTest, InitTwiceIsRefused) {
  run_group(1, [](int) {
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }), HasSubstr("twice"));
  });
}

TEST(ProcessGroupTest, RefusedArgumentsAreTheCallersMistake) {
  run_group(2, [](int) {
    std::vector<at::Tensor> unequal{at::ones({2}), at::ones({3})};
    EXPECT_THAT(message_of<UserError>([&] { dist::default_group()->allreduce(unequal); }),
                HasSubstr("all_reduce #1 of group '0' was refused"));
  });
}

// Gloo's own threads would throw for these.
TEST(ProcessGroupTest, WhatGlooCannotReduceIsRefusedOnEachRankAndTheGroupGoesOn) {
  run_group(2, [](int rank) {
    const auto start = [](at::ScalarType type, c10d::ReduceOp::RedOpType op) {
      std::vector<at::Tensor> tensors{at::ones({3}, type)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return dist::default_group()->allreduce(tensors, options);
    };
    EXPECT_THAT(
        message_of<UserError>([&] { start(at::kShort, c10d::ReduceOp::SUM)->wait(); }),
        AllOf(HasSubstr("rank " + std::to_string(rank) + " of 2: all_reduce #1 of group '0' was "),
              HasSubstr("refused: Invalid scalar type (all_reduce of Short [3])")));
    const auto work = start(at::kFloat, c10d::ReduceOp::BAND);
    EXPECT_THAT(message_of<UserError>([&] { work->getFuture()->waitAndThrow(); }),
                AllOf(HasSubstr("#2"), HasSubstr("of Float [3] by BAND")));
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, 3.0)));
  });
}

TEST(ProcessGroupTest, ReduceScattersSeveralTensorsInOneCall) {
  run_group(2, [](int rank) {
    std::vector<at::Tensor> inputs{at::arange(4.0), at::arange(6.0) + rank};
    std::vector<at::Tensor> outputs{at::empty({2}), at::empty({3})};
    dist::default_group()->reduce_scatter_tensor_coalesced(outputs, inputs)->wait();
    EXPECT_TRUE(outputs[0].equal(2 * at::arange(4.0).narrow(0, 2 * rank, 2)));
    EXPECT_TRUE(outputs[1].equal(2 * at::arange(6.0).narrow(0, 3 * rank, 3) + 1));
  });
}

TEST(ProcessGroupTest, ReduceScattersPartsOfDifferentSizes) {
  run_group(2, [](int rank) {
    std::vector<std::vector<at::Tensor>> inputs{{at::arange(1.0) + rank, at::arange(2.0) + rank}};
    std::vector<at::Tensor> outputs{at::empty({rank + 1})};
    dist::default_group()->reduce_scatter(outputs, inputs)->wait();
    EXPECT_TRUE(outputs[0].equal(2 * at::arange(rank + 1.0) + 1));
  });
}

TEST(ProcessGroupTest, AnOutputThatCannotBeWrittenIsRefusedAndTheGroupGoesOn) {
  run_group(2, [](int rank) {
    std::vector<at::Tensor> expanded{at::ones({3}).expand({2, 3})};
    EXPECT_THAT(message_of<UserError>([&] { dist::default_group()->allreduce(expanded)->wait(); }),
                AllOf(HasSubstr("all_reduce #1 of group '0' was refused"),
                      HasSubstr("single memory location")));
    at::Tensor tensor = value_of(rank);
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(at::full({2, 3}, 3.0)));
  });
}

TEST(ProcessGroupTest, AGroupThatWasDestroyedRefusesCalls) {
  run_group(2, [](int rank) {
    const auto group = dist::default_group();
    dist::barrier();
    dist::destroy_process_group();
    at::Tensor tensor = value_of(rank);
    EXPECT_THAT(
        message_of<UserError>([&] { dist::all_reduce(tensor, c10d::ReduceOp::SUM, group); }),
        HasSubstr("was shut down"));
  });
}

TEST(ProcessGroupTest, GroupsMadeForPythonAreDestroyedFromCpp) {
  run_ranks(1, [](int) {
    dist::detail::init_process_group(c10::make_intrusive<c10d::HashStore>(),
                                     {.rank = 0, .world_size = 1}, std::nullopt);
    const auto joined = dist::detail::join_group("joined", {0}, milliseconds(1000));
    dist::destroy_process_group();
    EXPECT_FALSE(dist::is_initialized());
    EXPECT_THAT(message_of<UserError>([&] { joined->barrier(); }), HasSubstr("was shut down"));
  });
}

TEST(ProcessGroupTest, AForkedProcessIsToldThatGroupsAreItsParents) {
  run_group(2, [](int) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::string said = message_of<UserError>([] { dist::barrier(); });
      dist::destroy_process_group();
      ::_exit(said.find("was forked") != std::string::npos ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    dist::barrier();
  });
}

TEST(ProcessGroupTest, DifferentListsOfRanksAreNamed) {
  run_group(2, [](int rank) {
    EXPECT_THAT(message_of<UserError>([&] {
                  dist::new_group(rank == 0 ? std::vector{0, 1} : std::vector{1, 0});
                }),
                HasSubstr("rank 0 gives the ranks {0,1}, rank 1 gives {1,0}"));
  });
}

TEST(ProcessGroupTest, AnEndlessTimeoutIsAVeryLongOne) {
  run_ranks(2, [](int) {
    constexpr auto kEndless = std::chrono::milliseconds::max();
    dist::init_process_group({.timeout = kEndless, .connect_timeout = kEndless});
    dist::barrier(dist::new_group({0, 1}, kEndless));
  });
}

// While others are still connecting to it, or are already connected.
TEST(FaultTest, ARankThatDiesRightAfterInitIsNamed) {
  const auto results = run_group_and_collect(4, [](int rank) {
    if (rank == 3) ::raise(SIGKILL);
    dist::barrier();
  });
  for (const int rank : {0, 1, 2}) {
    const auto& result = results[static_cast<size_t>(rank)];
    EXPECT_EQ(result.exit_code, syncbn::base::kExitUnavailable) << result.output;
    // Rank 0 may itself be gone before it has passed on the cause.
    EXPECT_THAT(result.output, AnyOf(HasSubstr("rank 3 ("), HasSubstr("rank 0 (")));
  }
}

TEST(FaultTest, APeerThatDiesBeforeANewGroupIsNamed) {
  const auto results = run_group_and_collect(2, [](int rank) {
    if (rank == 1) ::raise(SIGKILL);
    dist::new_group({0, 1});
  });
  EXPECT_EQ(results[0].exit_code, syncbn::base::kExitUnavailable) << results[0].output;
  EXPECT_THAT(results[0].output, HasSubstr("rank 1"));
}

}  // namespace

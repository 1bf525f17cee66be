#include "support/multiproc.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::HasSubstr;

TEST(RunRanksTest, EachRankKnowsItsPlace) {
  const auto results = run_ranks_and_collect({.world_size = 3}, [](int rank) {
    EXPECT_EQ(std::to_string(rank), std::getenv("RANK"));
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "3");
    ::_exit(10 + rank);
  });
  ASSERT_EQ(results.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(results[static_cast<size_t>(rank)].exit_code, 10 + rank);
  }
}

TEST(RunRanksTest, AnAssertionInOneRankMakesItsExitCode) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    if (rank == 1) ADD_FAILURE() << "only rank 1";
  });
  EXPECT_EQ(results[0].exit_code, 0);
  EXPECT_EQ(results[1].exit_code, 1);
  EXPECT_THAT(results[1].output, HasSubstr("only rank 1"));
}

TEST(RunRanksTest, AFailedRankFailsTheTestWithItsOutput) {
  EXPECT_NONFATAL_FAILURE(run_ranks(1,
                                    [](int) {
                                      std::printf("last words\n");
                                      std::fflush(stdout);
                                      ::_exit(3);
                                    }),
                          "last words");
}

TEST(RunRanksTest, ASignalAndARankThatHangsAreSeen) {
  const auto results = run_ranks_and_collect({.world_size = 1}, [](int) { ::raise(SIGABRT); });
  EXPECT_EQ(results[0].exit_code, 128 + SIGABRT);
  EXPECT_NONFATAL_FAILURE(
      run_ranks_and_collect({.world_size = 1, .timeout_seconds = 0.2}, [](int) { ::pause(); }),
      "still running");
}

}  // namespace

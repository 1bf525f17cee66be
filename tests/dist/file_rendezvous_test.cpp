// Ranks that meet in a file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "support/multiproc.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::RankResult;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using syncbn::test::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_success(const std::vector<RankResult>& results) {
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

std::string url_of(const TempFolder& folder) {
  return "file://" + (folder / "store").string();
}

TEST(FileRendezvousTest, RanksMeetInAFileThatGoesWithTheLast) {
  const TempFolder folder;
  int first_is_gone[2];
  ASSERT_EQ(::pipe(first_is_gone), 0);
  const auto results = run_ranks_and_collect({.set_master = false}, [&](int rank) {
    for (int round = 0; round < 2; ++round) {
      dist::init_process_group({.init_method = url_of(folder) + std::to_string(round)});
      EXPECT_EQ(dist::world_size(), 2);
      dist::barrier();
      ASSERT_TRUE(dist::new_group({0, 1}));
      // If both leave at once, c10d's FileStore may not notice that one of them is the last.
      char byte = 0;
      if (rank == 1) {
        ASSERT_EQ(::read(first_is_gone[0], &byte, 1), 1);
      }
      dist::destroy_process_group();
      if (rank == 0) {
        ASSERT_EQ(::write(first_is_gone[1], &byte, 1), 1);
      }
    }
  });
  expect_success(results);
  EXPECT_TRUE(folder.empty());
}

TEST(FileRendezvousTest, RankAndWorldSizeMayComeFromTheOptions) {
  const TempFolder folder;
  const auto results = run_ranks_and_collect({.set_master = false}, [&](int rank) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::unsetenv(name);
    dist::init_process_group({.init_method = url_of(folder), .rank = rank, .world_size = 2});
    dist::barrier();
  });
  expect_success(results);
}

TEST(FileRendezvousTest, AFileThatAnEarlierJobLeftIsRefusedByAllRanks) {
  const TempFolder folder;
  const auto crashing = run_ranks_and_collect({.set_master = false}, [&](int) {
    dist::init_process_group({.init_method = url_of(folder)});
    dist::barrier();  // without destroy_process_group()
  });
  expect_success(crashing);
  const auto results = run_ranks_and_collect({.set_master = false}, [&](int) {
    EXPECT_THAT(
        message_of<UserError>([&] { dist::init_process_group({.init_method = url_of(folder)}); }),
        HasSubstr("delete '" + (folder / "store").string() + "' if an earlier job left it"));
  });
  expect_success(results);
}

TEST(FileRendezvousTest, AFileThatCannotBeMadeIsNamed) {
  const TempFolder folder;
  const std::string nowhere = (folder / "no folder/store").string();
  run_ranks(1, [&](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    // Not even root may write to /proc.
    for (const std::string& path : {nowhere, std::string("/proc/store")}) {
      EXPECT_THAT(
          message_of<UserError>(
              [&] { dist::init_process_group({.init_method = "file://" + path}); }),
          AllOf(HasSubstr("init_method 'file://" + path + "': "), HasSubstr("No such file")));
    }
  });
  for (const char* url : {"file://store", "file:///", "file://"}) {
    EXPECT_THAT(message_of<UserError>([&] { dist::init_process_group({.init_method = url}); }),
                HasSubstr(std::string(url) + "' is not file:///path"));
  }
}

TEST(FileRendezvousTest, AMissingRankIsNamed) {
  const TempFolder folder;
  run_ranks(1, [&](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    EXPECT_THAT(message_of<UnavailableError>([&] {
                  dist::init_process_group(
                      {.init_method = url_of(folder), .connect_timeout = milliseconds(300)});
                }),
                HasSubstr("for rank 1, which did not arrive"));
  });
}

}  // namespace

// Samplers without a given rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <syncbn/base/error.h>
#include <syncbn/data/distributed_sampler.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>

#include "support/multiproc.h"
#include "support/thrown.h"

namespace syncbn {
namespace {

using data::DistributedSampler;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ProcessRankTest, IsThatOfTheDefaultGroup) {
  test::run_ranks(3, [](int rank) {
    // The default group determines the rank, not the environment.
    dist::init_process_group();
    ::setenv("WORLD_SIZE", "7", 1);
    DistributedSampler sampler(9, {.shuffle = false});
    EXPECT_THAT(sampler.indices(), ElementsAre(rank, rank + 3, rank + 6));
    const auto set =
        data::make_synthetic({.size = 9, .height = 2, .width = 2}, data::Split::kTrain);
    EXPECT_EQ(data::Loader(set, {}).num_batches(), 9) << "all samples on one rank";
    EXPECT_EQ(DistributedSampler(9, {.num_replicas = 4, .rank = 1}).num_replicas(), 4);
    dist::destroy_process_group();
    ::setenv("WORLD_SIZE", "1", 1);
    EXPECT_EQ(DistributedSampler(9).num_replicas(), 1);
  });
}

TEST(ProcessRankTest, IsThatOfTheEnvironmentWithoutAGroup) {
  test::run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "4", 1);
    ::setenv("RANK", "2", 1);
    EXPECT_THAT(DistributedSampler(8, {.shuffle = false}).indices(), ElementsAre(2, 6));
    ::unsetenv("RANK");
    EXPECT_THAT(test::message_of<base::UserError>([] { DistributedSampler(8); }),
                HasSubstr("WORLD_SIZE is 4 and RANK is not set; call init_process_group() first"));
    ::unsetenv("WORLD_SIZE");
    EXPECT_EQ(DistributedSampler(8).num_replicas(), 1);
    ::setenv("RANK", "3", 1);
    EXPECT_THAT(test::message_of<base::UserError>([] { DistributedSampler(8); }),
                HasSubstr("RANK is 3 and WORLD_SIZE is not set; call init_process_group() first"));
  });
}

}  // namespace
}  // namespace syncbn

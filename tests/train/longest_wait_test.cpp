#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>

#include "data_wait.h"
#include "support/multiproc.h"

namespace syncbn::train {
namespace {

TEST(LongestWaitTest, IsThatOfTheRankThatWaitedTheMost) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto wait = longest({.seconds = rank == 1 ? 4.0 : 1.0, .share = 0.25 * rank}, at::kCPU);
    EXPECT_EQ(wait.seconds, 4);
    EXPECT_EQ(wait.share, 0.5);
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::train

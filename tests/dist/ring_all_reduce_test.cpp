// The example that implements an all-reduce with isend and recv.

#include "dist/group.h"
#include "ring_all_reduce/ring.h"

#include <gtest/gtest.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include "support/program.h"

namespace {

namespace dist = syncbn::dist;
using syncbn::test::ProgramResult;
using syncbn::test::run_group;
using syncbn::test::run_program;

TEST(RingAllReduceTest, AddsTheTensorsOfAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 5}) {
    run_group(ranks, [](int rank) {
      const at::Tensor own = at::full({3, 2}, rank + 1.0);
      at::Tensor sum = at::zeros_like(own);
      ring_all_reduce::all_reduce(own, sum);
      at::Tensor expected = own.clone();
      dist::all_reduce(expected);
      EXPECT_TRUE(sum.equal(expected)) << sum;
      EXPECT_TRUE(own.equal(at::full({3, 2}, rank + 1.0)));
    });
  }
}

TEST(RingAllReduceProgramTest, PrintsTheSum) {
  const ProgramResult result =
      run_program({SYNCBN_BIN_DIR "/syncbn-launch", "--standalone", "--nproc_per_node=3",
                   "--prefix=off", SYNCBN_RING_ALL_REDUCE},
                  {.env = {{"OMP_NUM_THREADS", "1"}}, .timeout_seconds = 110});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "sum over 3 ranks: 15 18 21 24, as by dist::all_reduce\n");
}

}  // namespace

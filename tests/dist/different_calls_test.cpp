// Ranks that call different things learn who called what.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <ATen/ops/ones.h>

#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using at::Tensor;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

void sum(int64_t size = 3) {
  Tensor tensor = at::ones({size});
  dist::all_reduce(tensor);
}

/// What both ranks of two say when they call different things.
template <class First, class Second>
void expect_disagreement(First first, Second second, const std::vector<std::string>& parts) {
  run_ranks(2, [&](int rank) {
    dist::init_process_group();
    sum();
    const std::string message = message_of<UserError>([&] { rank == 0 ? first() : second(); });
    EXPECT_THAT(message, HasSubstr("the ranks called different things: #2 is "));
    for (const std::string& part : parts) EXPECT_THAT(message, HasSubstr(part));
  });
}

TEST(DifferentCallsTest, DifferentShapesAreNamedWithBothRanks) {
  expect_disagreement(
      [] { sum(3); }, [] { sum(4); },
      {"rank 0 (", "all_reduce of Float [3]", "rank 1 (", "all_reduce of Float [4]"});
}

TEST(DifferentCallsTest, AnAllGatherIsCalledSoHoweverItIsDone) {
  expect_disagreement(
      [] {
        dist::all_gather(at::ones({3, 1}));
      },
      [] { dist::all_gather(at::ones({4})); },
      {"all_gather of Float [3, 1]", "all_gather of Float [4]"});
}

TEST(DifferentCallsTest, DifferentCollectivesAreNamed) {
  expect_disagreement([] { sum(3); }, [] { dist::barrier(); },
                      {"all_reduce of Float [3]", "barrier on rank 1"});
}

TEST(DifferentCallsTest, DifferentDtypesRootsAndOperationsAreNamed) {
  expect_disagreement(
      [] {
        Tensor tensor = at::ones({3}, at::kInt);
        dist::all_reduce(tensor);
      },
      [] { sum(3); }, {"of Int [3]", "of Float [3]"});
  const auto broadcast_from = [](int root) {
    Tensor tensor = at::ones({3});
    dist::broadcast(tensor, root);
    sum();  // the root does not wait for anybody
  };
  expect_disagreement([&] { broadcast_from(0); }, [&] { broadcast_from(1); },
                      {"with root 0", "with root 1"});
  const auto reduce_by = [](c10d::ReduceOp::RedOpType op) {
    Tensor tensor = at::ones({3});
    dist::all_reduce(tensor, op);
  };
  expect_disagreement([&] { reduce_by(c10d::ReduceOp::MAX); },
                      [&] { reduce_by(c10d::ReduceOp::MIN); }, {"by MAX", "by MIN"});
}

TEST(DifferentCallsTest, ASendAndARecvThatDoNotFitAreNamed) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    Tensor tensor = at::ones({3 + rank});
    const std::string message =
        message_of<UserError>([&] { rank == 0 ? dist::send(tensor, 1) : dist::recv(tensor, 0); });
    EXPECT_THAT(message, AllOf(HasSubstr("send of Float [3] on rank 0 ("),
                               HasSubstr("recv of Float [4] on rank 1 (")));
  });
}

TEST(DifferentCallsTest, ALateDifferenceIsFound) {
  expect_disagreement([] { sum(3); },
                      [] {
                        ::usleep(2'500'000);
                        sum(4);
                      },
                      {"[3]", "[4]"});
}

}  // namespace

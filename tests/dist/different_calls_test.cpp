// Ranks that make different calls learn which rank made which call.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/call_trace.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dist/group.h"
#include "monitor/flight_recorder.h"
#include "monitor/monitor_channel.h"
#include "monitor/peer_monitor.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace detail = syncbn::dist::detail;
using at::Tensor;
using syncbn::base::UserError;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void sum_over_ranks(int64_t size = 3) {
  Tensor tensor = at::ones({size});
  dist::all_reduce(tensor);
}

/// Checks the errors of two ranks that make different calls.
template <class First, class Second>
void expect_disagreement(First first, Second second, const std::vector<std::string>& parts) {
  run_group(2, [&](int rank) {
    sum_over_ranks();
    const std::string message = message_of<UserError>([&] { rank == 0 ? first() : second(); });
    EXPECT_THAT(message, HasSubstr("the ranks made different calls: #2 is "));
    for (const std::string& part : parts) EXPECT_THAT(message, HasSubstr(part));
  });
}

TEST(DifferentCallsTest, DifferentShapesAreNamedWithBothRanks) {
  expect_disagreement(
      [] { sum_over_ranks(3); }, [] { sum_over_ranks(4); },
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

TEST(DifferentCallsTest, AnEmptyTensorOnOneRankIsNamed) {
  expect_disagreement([] { dist::all_gather(at::ones({0})); },
                      [] { dist::all_gather(at::ones({4})); },
                      {"all_gather of Float [0]", "all_gather of Float [4]"});
}

TEST(DifferentCallsTest, DifferentCollectivesAreNamed) {
  expect_disagreement([] { sum_over_ranks(3); }, [] { dist::barrier(); },
                      {"all_reduce of Float [3]", "barrier on rank 1"});
}

TEST(DifferentCallsTest, DifferentDtypesRootsAndOperationsAreNamed) {
  expect_disagreement(
      [] {
        Tensor tensor = at::ones({3}, at::kInt);
        dist::all_reduce(tensor);
      },
      [] { sum_over_ranks(3); }, {"of Int [3]", "of Float [3]"});
  const auto broadcast_from = [](int root) {
    Tensor tensor = at::ones({3});
    dist::broadcast(tensor, root);
    sum_over_ranks();  // the root does not wait for the others
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

TEST(DifferentCallsTest, EachTensorOfACoalescedCallIsCompared) {
  const auto sum_with = [](int64_t size) {
    std::vector<Tensor> tensors{at::ones({3}), at::ones({size})};
    dist::default_group()->allreduce_coalesced(tensors)->wait();
  };
  expect_disagreement([&] { sum_with(8); }, [&] { sum_with(9); },
                      {"all_reduce (coalesced) of Float [3], Float [8]",
                       "all_reduce (coalesced) of Float [3], Float [9]"});
}

TEST(DifferentCallsTest, ACoalescedCallIsNoPlainOne) {
  expect_disagreement(
      [] {
        std::vector<Tensor> outputs{at::ones({2})};
        std::vector<Tensor> inputs{at::ones({4})};
        dist::default_group()->reduce_scatter_tensor_coalesced(outputs, inputs)->wait();
      },
      [] {
        Tensor output = at::ones({2});
        dist::reduce_scatter_tensor(output, at::ones({4}));
      },
      {"reduce_scatter (coalesced) of Float [4] on rank 0 (",
       "reduce_scatter_tensor of Float [4] on rank 1 ("});
}

TEST(DifferentCallsTest, ASendAndARecvThatDoNotFitAreNamed) {
  run_group(2, [](int rank) {
    Tensor tensor = at::ones({3 + rank});
    const std::string message =
        message_of<UserError>([&] { rank == 0 ? dist::send(tensor, 1) : dist::recv(tensor, 0); });
    EXPECT_THAT(message, AllOf(HasSubstr("send of Float [3] on rank 0 ("),
                               HasSubstr("recv of Float [4] on rank 1 (")));
  });
}

// A size and then the data, to a slow rank: each waits for longer than it takes to report a call.
TEST(DifferentCallsTest, ASendThatHadToWaitIsNotComparedWithALaterRecv) {
  run_group(2, [](int rank) {
    Tensor size = at::ones({1});
    Tensor data = at::ones({8}).mul(1 - rank);
    if (rank == 0) {
      dist::send(size, 1);
      ::usleep(2'500'000);
      dist::send(data, 1);
    } else {
      ::usleep(2'500'000);
      dist::recv(size, 0);
      dist::recv(data, 0);
    }
    EXPECT_EQ(data.sum().item<float>(), 8);
  });
}

TEST(DifferentCallsTest, ALateDifferenceIsFound) {
  expect_disagreement([] { sum_over_ranks(3); },
                      [] {
                        ::usleep(2'500'000);  // longer than it takes to report a call
                        sum_over_ranks(4);
                      },
                      {"[3]", "[4]"});
}

// Rank 0 passes on the messages about a group to which it does not belong.
TEST(DifferentCallsTest, OneOfManyIsNamedInAGroupWithoutRankZero) {
  run_group(5, [](int rank) {
    const auto group = dist::new_group({1, 2, 3, 4});
    if (rank > 0) {
      const std::string message = message_of<UserError>([&] {
        Tensor tensor = at::ones({rank == 3 ? 4 : 3});
        dist::all_reduce(tensor, c10d::ReduceOp::SUM, group);
      });
      EXPECT_THAT(message, AllOf(HasSubstr("all_reduce of Float [4] on rank 3 ("),
                                 HasSubstr("all_reduce of Float [3] on rank ")));
    }
    dist::barrier();
  });
}

/// Never completes.
struct EndlessWork : c10d::Work {
  bool isCompleted() override { return false; }
};

TEST(DifferentCallsTest, AThirdRankHearsOnceThatAllAreStuck) {
  run_ranks(1, [](int) {
    constexpr int kRanks = 4;
    constexpr int kSpy = kRanks - 1;
    const std::string here = "127.0.0.1";
    const std::chrono::milliseconds limit(20'000);
    c10d::HashStore store;
    std::vector<std::shared_ptr<detail::PeerMonitor>> monitors;
    for (int rank = 0; rank < kSpy; ++rank) {
      monitors.push_back(detail::PeerMonitor::join(store, rank, kRanks, here, limit));
    }
    std::atomic<int> heard = 0;
    detail::MonitorChannel spy(store, kSpy, kRanks, here, limit);
    spy.start({.message = [&](const detail::Message& message) { heard += message.type == "stuck"; },
               .end = [](int, const std::string&) {},
               .tick = [] {}});
    const auto work = c10::make_intrusive<EndlessWork>();
    detail::Call call;
    call.sequence = 1;
    std::vector<std::shared_ptr<detail::FlightRecorder>> logs;
    for (const auto& monitor : monitors) {
      logs.push_back(std::make_shared<detail::FlightRecorder>("group", std::vector<int>{0, 1, 2, 3},
                                                              [](auto) {}));
      logs.back()->begin(call);
      monitor->add(logs.back());
    }
    EXPECT_TRUE(syncbn::test::eventually([&] { return heard > 0; }));
    ::usleep(1'000'000);  // time for the others to be notified
    EXPECT_EQ(heard, 1);
  });
}

TEST(FlightRecorderTest, ACallWithoutAWorkIsPendingUntilItIsSaidToBeOver) {
  detail::FlightRecorder log("group", {0, 1}, [](auto) {});
  detail::Call call;
  for (const bool succeeds : {true, false}) {
    ++call.sequence;
    log.begin(call);
    ASSERT_EQ(log.pending().size(), 1);
    EXPECT_EQ(log.pending()[0].call.sequence, call.sequence);
    EXPECT_EQ(log.completed(), call.sequence - 1);
    succeeds ? log.succeed(call) : log.fail(call);
    EXPECT_TRUE(log.pending().empty());
    EXPECT_EQ(log.completed(), 1);
  }
}

TEST(FlightRecorderTest, ARefusedCallLeavesNothingBehind) {
  detail::FlightRecorder log("group", {0, 1}, [](auto) {});
  detail::Call call;
  constexpr uint64_t kCalls = detail::FlightRecorder::kKept + 100;
  for (call.sequence = 1; call.sequence <= kCalls; ++call.sequence) {
    log.begin(call);
    log.succeed(call);
  }
  log.begin(call);
  log.refuse(call);
  EXPECT_TRUE(log.pending().empty());
  EXPECT_EQ(log.completed(), kCalls);
}

TEST(FlightRecorderTest, ACallOnAGpuIsTracedWhenItIsQueued) {
  dist::CallTrace trace;
  detail::FlightRecorder log("group", {0, 1}, [](auto) {});
  detail::Call call;
  for (call.sequence = 1; call.sequence <= 2; ++call.sequence) {
    log.begin(call, std::chrono::milliseconds(1000));
    EXPECT_THAT(trace.take(), IsEmpty());
    const bool is_asked = call.sequence == 1;
    log.set_completion(call, is_asked ? std::function<bool()>([] { return true; }) : nullptr);
    EXPECT_EQ(trace.take().size(), 1);
    EXPECT_EQ(log.pending().size(), is_asked ? 1 : 0);
    log.update();
    EXPECT_THAT(log.pending(), IsEmpty());
    EXPECT_THAT(trace.take(), IsEmpty());
  }
}

TEST(FlightRecorderTest, ATraceThatNobodyReadsIsBounded) {
  dist::CallTrace trace;
  detail::FlightRecorder log("group", {0, 1}, [](auto) {});
  detail::Call call;
  const auto make_call = [&] {
    ++call.sequence;
    log.begin(call);
    log.succeed(call);
  };
  for (size_t n = 0; n < dist::CallTrace::kMaxCalls + 10; ++n) make_call();
  EXPECT_EQ(trace.take().size(), dist::CallTrace::kMaxCalls);
  make_call();
  EXPECT_EQ(trace.take().size(), 1);
}

}  // namespace

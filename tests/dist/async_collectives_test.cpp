// Asynchronous collectives give the results of their blocking forms.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>

#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "dist/group.h"
#include "support/eventually.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using at::Tensor;
using c10d::ReduceOp;
using dist::WorkPtr;
using std::chrono::milliseconds;
using syncbn::base::kExitSignalBase;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::eventually;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// Values that differ between ranks and elements. Every second column of a larger tensor, so that
/// the collective works on a copy.
Tensor strided(int rank, int64_t rows = 3) {
  const Tensor whole = (at::arange(rows * 4) + 100.0 * rank).view({rows, 4});
  return whole.slice(1, 0, 4, 2);
}

Tensor dense(int rank, int64_t rows = 3) {
  return strided(rank, rows).contiguous();
}

/// Large enough for several steps in shared memory.
Tensor large(int rank) {
  return at::full({1'000'000}, rank + 1.0F);
}

using Tensors = std::vector<Tensor>;
using Collective = std::function<void(Tensors&)>;
using AsyncCollective = std::function<WorkPtr(Tensors&)>;

/// Runs both forms on copies of the tensors, and also each form on different ranks.
void expect_equal(const Tensors& tensors, const Collective& blocking, const AsyncCollective& async,
                  int rank) {
  const auto copy = [&] {
    Tensors copies;
    for (const Tensor& one : tensors) {
      copies.push_back(at::empty_strided(one.sizes(), one.strides(), one.options()).copy_(one));
    }
    return copies;
  };
  Tensors expected = copy();
  blocking(expected);
  Tensors actual = copy();
  const WorkPtr work = async(actual);
  work->wait();
  EXPECT_TRUE(work->is_completed());
  EXPECT_FALSE(work->exception());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(actual[i].equal(expected[i])) << actual[i] << expected[i];
  }
  Tensors mixed = copy();
  if (rank == 0) {
    blocking(mixed);
  } else {
    async(mixed)->wait();
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(mixed[i].equal(expected[i])) << mixed[i] << expected[i];
  }
}

class AsyncCollectivesTest : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, AsyncCollectivesTest, ::testing::Values(2, 3));

TEST_P(AsyncCollectivesTest, ReductionsAndBroadcastsEqualTheirBlockingForms) {
  run_group(ranks(), [](int rank) {
    for (const Tensor& own : {strided(rank), dense(rank), large(rank), at::zeros({0, 2})}) {
      expect_equal(
          {own}, [](Tensors& t) { dist::all_reduce(t[0]); },
          [](Tensors& t) { return dist::all_reduce_async(t[0]); }, rank);
      expect_equal(
          {own}, [](Tensors& t) { dist::broadcast(t[0], 1); },
          [](Tensors& t) { return dist::broadcast_async(t[0], 1); }, rank);
    }
    for (const Tensor& own : {strided(rank), dense(rank)}) {
      expect_equal(
          {own}, [](Tensors& t) { dist::reduce(t[0], 1, ReduceOp::MAX); },
          [](Tensors& t) { return dist::reduce_async(t[0], 1, ReduceOp::MAX); }, rank);
    }
    const Tensor conjugate = at::complex(dense(rank), dense(rank)).conj();
    expect_equal(
        {conjugate}, [](Tensors& t) { dist::all_reduce(t[0]); },
        [](Tensors& t) { return dist::all_reduce_async(t[0]); }, rank);
  });
}

TEST_P(AsyncCollectivesTest, GathersReturnTheirTensorsInTheWork) {
  run_group(ranks(), [this](int rank) {
    for (const Tensor& own : {strided(rank), dense(rank), large(rank), at::zeros({0, 2}),
                              dense(rank) > 101, dense(rank, 5'000)}) {
      const Tensors expected = dist::all_gather(own);
      const WorkPtr work = dist::all_gather_async(own);
      ASSERT_THAT(work->tensors(), SizeIs(ranks()));
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(work->tensors()[i].equal(expected[i]));
      }
      // Different forms on different ranks.
      const Tensors mixed =
          rank == 0 ? dist::all_gather(own) : dist::all_gather_async(own)->tensors();
      EXPECT_TRUE(mixed[0].equal(expected[0]));
      EXPECT_TRUE(mixed[1].equal(expected[1]));
      Tensor joined = at::empty({ranks() * own.size(0)}, own.options()).unsqueeze(1);
      if (own.dim() == 2)
        joined = at::empty({own.size(1), ranks() * own.size(0)}, own.options()).t();
      expect_equal(
          {joined}, [&](Tensors& t) { dist::all_gather_into_tensor(t[0], own); },
          [&](Tensors& t) { return dist::all_gather_into_tensor_async(t[0], own); }, rank);
      dist::all_gather_into_tensor(joined, own);
      EXPECT_TRUE(joined.view_as(at::cat(expected)).equal(at::cat(expected)));
    }
    const WorkPtr work = dist::gather_async(strided(rank), 1);
    work->wait();
    EXPECT_THAT(work->tensors(), SizeIs(rank == 1 ? ranks() : 0));
    for (size_t i = 0; i < work->tensors().size(); ++i) {
      EXPECT_TRUE(work->tensors()[i].equal(dense(static_cast<int>(i))));
    }
    EXPECT_THAT(work->bytes(), IsEmpty());
  });
}

TEST_P(AsyncCollectivesTest, ScattersEqualTheirBlockingForms) {
  run_group(ranks(), [this](int rank) {
    Tensors parts;
    for (int to = 0; to < ranks(); ++to) parts.push_back(strided(rank * 10 + to));
    const Tensors mine = rank == 1 ? parts : Tensors{};
    expect_equal(
        {strided(50)}, [&](Tensors& t) { dist::scatter(t[0], mine, 1); },
        [&](Tensors& t) { return dist::scatter_async(t[0], mine, 1); }, rank);
    expect_equal(
        {strided(50)}, [&](Tensors& t) { dist::reduce_scatter(t[0], parts); },
        [&](Tensors& t) { return dist::reduce_scatter_async(t[0], parts); }, rank);
    const Tensor all = at::cat(parts);
    const Tensor before = all.clone();
    expect_equal(
        {strided(50)}, [&](Tensors& t) { dist::reduce_scatter_tensor(t[0], all); },
        [&](Tensors& t) { return dist::reduce_scatter_tensor_async(t[0], all); }, rank);
    EXPECT_TRUE(all.equal(before));
    Tensor by_list = dense(0);
    Tensor by_tensor = dense(0);
    dist::reduce_scatter(by_list, parts);
    dist::reduce_scatter_tensor(by_tensor, all);
    EXPECT_TRUE(by_list.equal(by_tensor));
  });
}

TEST_P(AsyncCollectivesTest, AllToAllEqualsItsBlockingForm) {
  run_group(ranks(), [this](int rank) {
    Tensors inputs;
    Tensors outputs;
    for (int other = 0; other < ranks(); ++other) {
      inputs.push_back(strided(rank * 10 + other, rank + other));
      outputs.push_back(at::zeros_like(inputs.back()));
    }
    expect_equal(
        outputs, [&](Tensors& t) { dist::all_to_all(t, inputs); },
        [&](Tensors& t) { return dist::all_to_all_async(t, inputs); }, rank);
    const Tensor rows = strided(rank, 2 * ranks());
    expect_equal(
        {at::zeros_like(rows)}, [&](Tensors& t) { dist::all_to_all_single(t[0], rows); },
        [&](Tensors& t) { return dist::all_to_all_single_async(t[0], rows); }, rank);
  });
}

TEST_P(AsyncCollectivesTest, BytesOfAnyLengthComeWithTheWork) {
  run_group(ranks(), [this](int rank) {
    const auto of = [](int r) { return std::string(static_cast<size_t>(r) * 1000, 'a' + r); };
    std::vector<std::string> all;
    for (int r = 0; r < ranks(); ++r) all.push_back(of(r));
    const std::vector<std::string> mine = rank == 1 ? all : std::vector<std::string>{};
    const WorkPtr broadcast = dist::broadcast_bytes_async(of(rank), 1);
    const WorkPtr empty = dist::broadcast_bytes_async(of(rank), 0);
    const WorkPtr gathered = dist::all_gather_bytes_async(of(rank));
    const WorkPtr at_root = dist::gather_bytes_async(of(rank), 1);
    const WorkPtr scattered = dist::scatter_bytes_async(mine, 1);
    dist::barrier_async()->wait();
    EXPECT_EQ(scattered->bytes().at(0), of(rank));
    EXPECT_EQ(at_root->bytes(), mine);
    EXPECT_EQ(gathered->bytes(), all);
    EXPECT_THAT(empty->bytes(), ElementsAre(""));
    EXPECT_THAT(broadcast->bytes(), ElementsAre(of(1)));
    EXPECT_THAT(broadcast->tensors(), IsEmpty());
    // Different forms on different ranks.
    const auto mixed = rank == 0 ? dist::all_gather_bytes(of(rank))
                                 : dist::all_gather_bytes_async(of(rank))->bytes();
    EXPECT_EQ(mixed, all);
  });
}

TEST_P(AsyncCollectivesTest, SeveralInFlightMayBeWaitedForInAnyOrder) {
  run_group(ranks(), [this](int rank) {
    constexpr size_t kCalls = 20;
    Tensors tensors;
    for (size_t i = 0; i < kCalls; ++i) {
      tensors.push_back(i % 5 == 0 ? large(rank) : strided(rank) + static_cast<double>(i));
    }
    Tensors expected;
    for (const Tensor& one : tensors) {
      expected.push_back(one.clone());
      dist::all_reduce(expected.back());
    }
    std::vector<WorkPtr> works;
    std::vector<WorkPtr> bytes;
    for (Tensor& one : tensors) {
      works.push_back(dist::all_reduce_async(one));
      if (works.size() % 4 == 0) bytes.push_back(dist::all_gather_bytes_async("x"));
      // Blocking calls between the asynchronous ones.
      if (works.size() % 7 == 0) dist::barrier();
      if (works.size() % 9 == 0) {
        EXPECT_THAT(dist::all_gather(dense(rank)), SizeIs(ranks()));
      }
    }
    for (size_t i = 0; i < kCalls; ++i) {
      // Ranks wait in different orders.
      const size_t which =
          rank == 0 ? kCalls - 1 - i : (i * 7 + static_cast<size_t>(rank)) % kCalls;
      works[which]->wait();
      EXPECT_TRUE(tensors[which].equal(expected[which])) << which;
    }
    for (const WorkPtr& work : bytes) EXPECT_THAT(work->bytes(), SizeIs(ranks()));
  });
}

TEST_P(AsyncCollectivesTest, PollingCompletesEveryKind) {
  run_group(ranks(), [this](int rank) {
    const int next = (rank + 1) % ranks();
    const int previous = (rank + ranks() - 1) % ranks();
    Tensor reduced = large(rank);
    Tensor part = dense(rank);
    Tensor received = at::zeros_like(dense(0));
    const std::vector<WorkPtr> works{
        dist::irecv(received, previous),
        dist::all_reduce_async(reduced),
        dist::all_gather_async(dense(rank)),
        dist::reduce_scatter_async(part, Tensors(static_cast<size_t>(ranks()), dense(rank))),
        dist::gather_async(dense(rank), 0),
        dist::broadcast_bytes_async("all", 0),
        dist::barrier_async(),
        dist::isend(dense(rank), next),
    };
    for (size_t i = 0; i < works.size(); ++i) {
      EXPECT_TRUE(eventually([&] { return works[i]->is_completed(); })) << i;
      EXPECT_FALSE(works[i]->exception());
    }
    EXPECT_TRUE(received.equal(dense(previous)));
  });
}

TEST(AsyncTransfersTest, MatchByTagAndPassEachOther) {
  run_group(2, [](int rank) {
    const int other = 1 - rank;
    Tensor seven = strided(50);
    Tensor eight = strided(50);
    const WorkPtr r8 = dist::irecv(eight, other, {}, 8);
    const WorkPtr r7 = dist::irecv(seven, other, {}, 7);
    const WorkPtr s7 = dist::isend(strided(rank) + 7, other, {}, 7);
    const WorkPtr s8 = dist::isend(strided(rank) + 8, other, {}, 8);
    dist::barrier();
    r7->wait();
    s8->wait();
    r8->wait();
    s7->wait();
    EXPECT_TRUE(seven.equal(strided(other) + 7));
    EXPECT_TRUE(eight.equal(strided(other) + 8));
    // The same with blocking forms.
    if (rank == 0) dist::send(strided(0), 1);
    if (rank == 1) {
      dist::irecv(seven, 0)->wait();
      EXPECT_TRUE(seven.equal(strided(0)));
    }
  });
}

TEST(AsyncTransfersTest, ABatchStartsAllOrNothing) {
  run_group(3, [](int rank) {
    const int next = (rank + 1) % 3;
    const int previous = (rank + 2) % 3;
    Tensor received = strided(50);
    const auto batch = [&](int tag) {
      return dist::batch_isend_irecv(
          {dist::P2POp::send(strided(rank), next), dist::P2POp::recv(received, previous, tag)});
    };
    EXPECT_THAT(message_of<UserError>([&] { batch(-1); }), HasSubstr("tag -1"));
    for (const WorkPtr& work : batch(0)) work->wait();
    EXPECT_TRUE(received.equal(strided(previous)));
    EXPECT_THAT(dist::batch_isend_irecv({}), IsEmpty());
  });
}

TEST(AsyncTransfersTest, ASendThatNobodyReceivesIsNamedAtItsTimeout) {
  run_group(2, [](int rank) {
    const auto other = dist::new_group({0, 1});
    if (rank == 1) {
      dist::barrier(other);
      return;
    }
    const WorkPtr work = dist::isend(dense(0), 1, {}, 3, milliseconds(200));
    EXPECT_FALSE(work->exception());
    const std::string message = message_of<UnavailableError>([&] { work->wait(); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("send #1 to rank 1"),
                               HasSubstr("of group '0'"), HasSubstr("imed out")));
    // A second wait throws the same error.
    EXPECT_EQ(message_of<UnavailableError>([&] { work->wait(); }), message);
    EXPECT_TRUE(work->is_completed());
    EXPECT_TRUE(work->exception());
    dist::barrier(other);
  });
}

TEST(AsyncTransfersTest, APolledSendThatNobodyReceivesIsNamedAtTheTimeoutOfWait) {
  run_group(2, [](int rank) {
    const auto other = dist::new_group({0, 1});
    if (rank == 0) {
      const WorkPtr work = dist::isend(dense(0), 1);
      EXPECT_FALSE(work->is_completed());
      EXPECT_THAT(message_of<UnavailableError>([&] { work->wait(milliseconds(200)); }),
                  AllOf(HasSubstr("send #1 to rank 1"), HasSubstr("200ms")));
    }
    dist::barrier(other);
  });
}

TEST(AsyncTransfersTest, AfterAFailureARankSendsNothing) {
  for (const bool shared_memory : {true, false}) {
    run_group(2, {.timeout = std::chrono::seconds(20), .shared_memory = shared_memory},
              [=](int rank) {
                const auto other = dist::new_group({0, 1});
                if (rank == 0) {
                  const WorkPtr work = dist::isend(dense(0), 1);
                  EXPECT_THROW(work->wait(milliseconds(100)), UnavailableError);
                  const auto expect_no_start = [](const auto& call) {
                    EXPECT_THAT(message_of<UnavailableError>(call),
                                AllOf(HasSubstr("failed"), HasSubstr("gave up send #1")));
                  };
                  expect_no_start([] { dist::barrier(); });
                  expect_no_start([] { dist::send(dense(0), 1); });
                  expect_no_start([] { dist::all_gather_bytes("own"); });
                  dist::barrier(other);
                  return;
                }
                dist::barrier(other);  // rank 0 has made its calls
                EXPECT_THROW(dist::barrier(), UnavailableError);
              });
  }
}

TEST(AsyncWorkTest, AWorkMayBeWaitedForTwice) {
  run_group(2, [](int rank) {
    Tensor tensor = strided(rank);
    const WorkPtr work = dist::all_reduce_async(tensor);
    work->wait();
    tensor.fill_(7);
    work->wait();
    work->wait(milliseconds(1));
    EXPECT_TRUE(tensor.equal(at::full_like(tensor, 7))) << "a second wait wrote the result again";
    EXPECT_THAT(message_of<UserError>([&] { work->wait(milliseconds(0)); }), HasSubstr("above"));
  });
}

TEST(AsyncWorkTest, ADroppedWorkHarmsNobody) {
  run_group(3, [](int rank) {
    const int next = (rank + 1) % 3;
    const int previous = (rank + 2) % 3;
    for (int i = 0; i < 10; ++i) {
      Tensor gone = large(rank);
      Tensor strided_gone = strided(rank);
      dist::all_reduce_async(gone);
      dist::all_reduce_async(strided_gone);
      dist::all_gather_bytes_async("dropped");
      dist::reduce_scatter_async(strided_gone, Tensors(3, strided(rank)));
      dist::isend(large(rank), next, {}, i);
      Tensor received = at::zeros_like(large(0));
      dist::irecv(received, previous, {}, i);
    }
    Tensor tensor = dense(rank);
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.equal(dense(0) + dense(1) + dense(2)));
    // These sends and recvs have no counterpart: destroy_process_group() ends them.
    Tensor never = dense(0);
    dist::irecv(never, previous, {}, 1000);
    dist::isend(never, next, {}, 2000);
    dist::barrier();
    dist::destroy_process_group();
  });
}

TEST(AsyncWorkTest, WorksMayOutliveTheirGroup) {
  run_group(2, [](int rank) {
    Tensor tensor = large(rank);
    Tensor never = dense(0);
    std::vector<WorkPtr> works{dist::all_reduce_async(tensor), dist::irecv(never, 1 - rank)};
    works[0]->wait();
    dist::barrier();
    dist::destroy_process_group();
    try {
      works[1]->wait(milliseconds(200));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UserError&) {         // this rank has left
    } catch (const UnavailableError&) {  // or the other one before
    }
  });
}

TEST(AsyncWorkTest, ACallThatItsOwnRankEndsByDestroyingTheGroupSaysSo) {
  run_group(2, [](int rank) {
    const auto group = dist::new_group({0, 1});
    if (rank == 1) {
      EXPECT_THROW(dist::barrier(), UnavailableError) << "until rank 0 has left";
      return;
    }
    Tensor tensor = large(rank);
    Tensor never = dense(0);
    const std::vector<WorkPtr> works{dist::all_reduce_async(tensor, ReduceOp::SUM, group),
                                     dist::irecv(never, 1, group)};
    dist::destroy_process_group();
    for (const WorkPtr& work : works) {
      EXPECT_THAT(message_of<UserError>([&] { work->wait(milliseconds(200)); }),
                  AllOf(HasSubstr("of group '1' failed"),
                        HasSubstr("this rank has called destroy_process_group() before")));
    }
  });
}

TEST(AsyncCollectivesTest, AnOperationEndsWithTheWaitThatFails) {
  run_group(3, {.timeout = std::chrono::seconds(20)}, [](int rank) {
    const auto until_then = dist::new_group({0, 1, 2});
    at::Tensor tensor = at::full({4}, rank == 0 ? 100.0 : 1.0);
    if (rank == 0) {
      const WorkPtr work = dist::all_reduce_async(tensor);
      EXPECT_THROW(work->wait(milliseconds(300)), UnavailableError);
      tensor.fill_(-7);
      dist::barrier(until_then);
      std::this_thread::sleep_for(milliseconds(1500));  // the others end their sum meanwhile
      EXPECT_TRUE(tensor.equal(at::full({4}, -7.0)));   // only the caller writes to it
      EXPECT_THROW(dist::barrier(), UnavailableError);
      return;
    }
    dist::barrier(until_then);
    try {
      dist::all_reduce(tensor);
      EXPECT_TRUE(tensor.equal(at::full({4}, 102.0)));  // the sum with what rank 0 had published
    } catch (const UnavailableError&) {                 // or an error, but never another sum
    }
  });
}

TEST(AsyncWorkTest, DestroyingTheGroupEndsWhatWaitsForOtherRanks) {
  run_group(2, [](int rank) {
    Tensor tensor = large(rank);
    const auto group = dist::new_group({0, 1});
    dist::barrier(group);
    std::vector<WorkPtr> works;
    if (rank == 0) {
      // Rank 1 makes none of these calls.
      works = {dist::all_gather_bytes_async("alone", group),
               dist::all_reduce_async(tensor, ReduceOp::SUM, group),
               dist::all_gather_bytes_async("alone", group), dist::barrier_async(group)};
      EXPECT_FALSE(works[0]->is_completed());
    }
    dist::barrier();
    dist::destroy_process_group();
    for (const WorkPtr& work : works) EXPECT_THROW(work->wait(), syncbn::base::Error);
  });
}

TEST(AsyncWorkTest, AProgramMayEndWithCallsOnTheirWay) {
  run_group(2, [](int rank) {
    Tensor tensor = large(rank);
    dist::barrier();
    if (rank == 1) return;
    dist::all_gather_bytes_async("alone");
    dist::all_reduce_async(tensor);
    dist::irecv(tensor, 1)->is_completed();
  });
}

TEST(AsyncWorkTest, ArgumentsAreRefusedAtTheCall) {
  run_group(2, [](int rank) {
    Tensor undefined;
    Tensor two = at::ones({2});
    Tensor three = at::ones({3});
    const auto said = [](auto body) { return message_of<UserError>(body); };
    EXPECT_THAT(said([&] { dist::all_reduce_async(undefined); }), HasSubstr("undefined"));
    EXPECT_THAT(said([&] { dist::isend(two, rank); }), HasSubstr("this rank itself"));
    EXPECT_THAT(said([&] { dist::broadcast_bytes_async("", 2); }), HasSubstr("root 2"));
    EXPECT_THAT(
        said([&] { dist::all_gather_into_tensor(three, two); }),
        AllOf(HasSubstr("all_gather_into_tensor on rank"),
              HasSubstr("the output has 3 elements, and needs 2 times the 2 of the input")));
    EXPECT_THAT(said([&] { dist::reduce_scatter_tensor_async(two, three); }),
                HasSubstr("the input has 3 elements, and needs 2 times the 2 of the output"));
    EXPECT_THAT(said([&] { dist::scatter_bytes_async({"one"}, rank); }),
                HasSubstr("parts has length 1"));
    dist::barrier();
  });
}

TEST(AsyncWorkTest, DifferentCallsAreNamedAsTheirBlockingForms) {
  run_group(2, [](int rank) {
    Tensor tensor = at::ones({3 + rank});
    const WorkPtr work = dist::all_reduce_async(tensor);
    const std::string message = message_of<UserError>([&] { work->wait(); });
    EXPECT_THAT(message,
                AllOf(HasSubstr("the ranks made different calls: #1 is all_reduce of Float"),
                      HasSubstr("[3]"), HasSubstr("[4]")));
    EXPECT_EQ(message_of<UserError>([&] { work->wait(); }), message);
  });
}

TEST(AsyncWorkTest, DifferentCallsAfterBytesAreFound) {
  run_group(2, [](int rank) {
    const WorkPtr bytes = dist::all_gather_bytes_async("bytes");
    Tensor tensor = at::ones({3});
    const WorkPtr next = rank == 0 ? dist::all_reduce_async(tensor) : dist::barrier_async();
    EXPECT_THAT(bytes->bytes(), ElementsAre("bytes", "bytes"));
    EXPECT_THAT(
        message_of<UserError>([&] { next->wait(); }),
        AllOf(HasSubstr("#3 is "), HasSubstr("all_reduce of Float [3]"), HasSubstr("barrier")));
  });
}

TEST(AsyncWorkTest, ALateRankIsNamedAtTheTimeoutOfWait) {
  run_group(2, [](int rank) {
    const auto other = dist::new_group({0, 1});
    if (rank == 0) {
      Tensor tensor = at::ones({3});
      const WorkPtr work = dist::all_reduce_async(tensor);
      EXPECT_FALSE(work->is_completed());
      EXPECT_THAT(message_of<UnavailableError>([&] { work->wait(milliseconds(200)); }),
                  AllOf(HasSubstr("all_reduce #3 of group '0' failed"), HasSubstr("rank 1 ("),
                        HasSubstr("has not called it")));
      EXPECT_TRUE(work->is_completed());
    }
    dist::barrier(other);
  });
}

TEST(AsyncWorkTest, ADeadRankIsNamed) {
  const auto results = run_group_and_collect(3, [](int rank) {
    Tensor tensor = large(rank);
    Tensor received = dense(0);
    dist::barrier();
    if (rank == 1) ::raise(SIGKILL);
    const WorkPtr reduced = dist::all_reduce_async(tensor);
    const WorkPtr bytes = dist::all_gather_bytes_async("bytes");
    const WorkPtr transfer = dist::irecv(received, 1);
    for (const WorkPtr& work : {transfer, bytes, reduced}) {
      EXPECT_THAT(message_of<UnavailableError>([&] { work->wait(); }),
                  AllOf(HasSubstr("rank 1 ("), HasSubstr("died")));
      EXPECT_TRUE(work->exception());
    }
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
  EXPECT_EQ(results[1].exit_code, kExitSignalBase + SIGKILL);
  EXPECT_EQ(results[2].exit_code, 0) << results[2].output;
}

TEST(WorldRankTest, RootsAndPeersMayBeRanksOfTheWorld) {
  run_group(3, [](int rank) {
    const auto pair = dist::new_group({2, 0});
    EXPECT_EQ(dist::get_group_rank({}, 2), 2);
    if (!pair) return;
    EXPECT_EQ(dist::get_group_rank(pair, 2), 0);
    EXPECT_EQ(dist::get_global_rank(pair, 1), 0);
    EXPECT_THAT(message_of<UserError>([&] { dist::get_group_rank(pair, 1); }),
                HasSubstr("rank 1 of the world is not in group '1', which has 2 ranks"));
    EXPECT_THAT(message_of<UserError>([&] { dist::get_global_rank(pair, 2); }),
                HasSubstr("no rank 2"));
    const dist::WorldRank two(2);
    Tensor by_world = dense(rank);
    dist::broadcast(by_world, two, pair);
    EXPECT_TRUE(by_world.equal(dense(2)));
    Tensor by_group = dense(rank);
    dist::broadcast_async(by_group, 1, pair)->wait();
    EXPECT_TRUE(by_group.equal(dense(0)));
    EXPECT_EQ(dist::broadcast_bytes_async(std::to_string(rank), two, pair)->bytes().at(0), "2");
    EXPECT_THAT(dist::gather(dense(rank), two, pair), SizeIs(rank == 2 ? 2 : 0));
    if (rank == 2) dist::send(dense(2), dist::WorldRank(0), pair);
    if (rank == 0) {
      dist::irecv(by_group, two, pair)->wait();
      EXPECT_TRUE(by_group.equal(dense(2)));
    }
  });
}

TEST(AsyncWorkTest, OtherGroupsAreIndependent) {
  run_group(3, [](int rank) {
    const auto pair = dist::new_group({2, 0});
    Tensor all = dense(rank);
    const WorkPtr bytes = dist::all_gather_bytes_async("world");
    if (pair) {
      Tensor two = dense(rank);
      dist::all_reduce_async(two, ReduceOp::SUM, pair)->wait();
      EXPECT_TRUE(two.equal(dense(0) + dense(2)));
      EXPECT_THAT(dist::all_gather_bytes_async(std::to_string(rank), pair)->bytes(),
                  ElementsAre("2", "0"));
    }
    dist::all_reduce_async(all)->wait();
    EXPECT_TRUE(all.equal(dense(0) + dense(1) + dense(2)));
    EXPECT_THAT(bytes->bytes(), SizeIs(3));
  });
}

}  // namespace

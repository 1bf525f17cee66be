// Collectives between the ranks of one host, through shared memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collectives/gather_rows.h"
#include "dist/group.h"
#include "dist/shared_calls.h"
#include "groups/world.h"
#include "support/affinity.h"
#include "support/skip.h"
#include "support/thrown.h"
#include "transport/exchange.h"
#include "transport/operation.h"

namespace syncbn::test {
namespace {

using at::Tensor;
using base::UserError;
using c10d::ReduceOp;
using dist::ProcessGroupPtr;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SharedMemoryCpusTest, RanksThatShareCpusDoNotSpin) {
  const base::Cpus cpus = base::allowed_cpus();
  SYNCBN_SKIP_UNLESS(base::usable_cpus() >= 2, "two-cores");
  namespace shm = dist::detail::shm;
  ::unsetenv("LOCAL_WORLD_SIZE");
  const auto may_spin = [](const std::vector<int>& bound_to) {
    const shm::Layout layout(static_cast<int>(bound_to.size()));
    std::vector<shm::Segment> segments;
    for (const int cpu : bound_to) {
      Affinity affinity;
      affinity.bind_to(cpu);
      segments.push_back(shm::Segment::make(layout).value());
    }
    return shm::have_cpus_for_all(segments);
  };
  const int first = *cpus.begin();
  const int last = *cpus.rbegin();
  EXPECT_TRUE(may_spin({first}));
  EXPECT_TRUE(may_spin({first, last}));
  EXPECT_FALSE(may_spin({first, first}));
  EXPECT_FALSE(may_spin({first, last, last}));
  // A rank outside of the group may share the CPU.
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  EXPECT_FALSE(may_spin({first}));
  EXPECT_TRUE(may_spin({first, last}));
  ::unsetenv("LOCAL_WORLD_SIZE");
}

class SharedMemoryTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SharedMemoryTest, ::testing::Values(1, 2, 3, 4));

TEST_P(SharedMemoryTest, ReducesAveragesGathersAndBroadcasts) {
  run_group(GetParam(), [](int rank) {
    reduce_everything(rank);
    if (GetParam() > 1) average_everything(rank);  // a world of one uses Gloo
    gather_everything(rank);
    broadcast_everything(rank);
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, ABarrierWaitsForAll) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  run_group(3, [&](int rank) {
    if (rank != 0) {
      ::usleep(200'000);  // rank 0 waits in the barrier meanwhile
      ASSERT_EQ(::write(pipe_ends[1], "x", 1), 1);
    }
    dist::barrier();
    if (rank == 0) {
      char both[2];
      EXPECT_EQ(::read(pipe_ends[0], both, 2), 2) << "after the barrier both have written";
    }
    expect_all_shared();
  });
}

// Gloo would ignore gaps between elements.
TEST(SharedMemoryTest, StridesMayBeAnyAndDifferBetweenRanks) {
  run_group(2, [](int rank) {
    for (const int64_t size : {3, 300}) {
      const Tensor numbers = at::arange(size * size, at::kFloat).view({size, size});
      Tensors sums{rank == 0 ? numbers.clone() : numbers.t().contiguous().t()};
      dist::default_group()->allreduce(sums)->wait();
      EXPECT_TRUE(sums[0].equal(numbers * 2));
      Tensors column{at::full({size, size}, rank).select(1, 1)};
      dist::default_group()->broadcast(column, c10d::BroadcastOptions{.rootRank = 1})->wait();
      EXPECT_TRUE(column[0].equal(at::ones({size}, at::kLong)));
      std::vector<Tensors> lists{at::zeros({size, 2}).unbind(1)};
      Tensors row{numbers.select(1, rank)};
      dist::default_group()->allgather(lists, row)->wait();
      EXPECT_TRUE(lists[0][0].equal(numbers.select(1, 0)));
      EXPECT_TRUE(lists[0][1].equal(numbers.select(1, 1)));
    }
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, AllRanksGetTheSameBitsInTheOrderOfRanks) {
  run_group(4, [](int rank) {
    for (const int64_t size : {1'000, 500'000}) {
      Tensors all;
      for (int other = 0; other < 4; ++other) {
        at::manual_seed(static_cast<uint64_t>(other));
        all.push_back(at::randn({size}));
      }
      const Tensor sum = all_reduced(all[static_cast<size_t>(rank)]);
      EXPECT_TRUE(sum.equal(((all[0] + all[1]) + all[2]) + all[3]));
    }
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, WhatItDoesNotKnowGoesThroughGlooInBetween) {
  run_group(3, [](int rank) {
    for (int turn = 0; turn < 20; ++turn) {
      Tensor tensor = at::full({5}, rank + 1);
      dist::all_reduce(tensor);
      EXPECT_TRUE(tensor.equal(at::full({5}, 6)));
      dist::reduce(tensor, turn % 3);
      EXPECT_TRUE(tensor.equal(at::full({5}, turn % 3 == rank ? 18 : 6)));
      Tensor bits = at::full({5}, 1 << rank);
      dist::all_reduce(bits, ReduceOp::BOR);
      EXPECT_TRUE(bits.equal(at::full({5}, 7)));
    }
    EXPECT_EQ(backend().shared_calls(), 20U);
    EXPECT_EQ(backend().sequence(), 60U);
  });
}

/// Starts all-reduces of rank + i, small and large ones by turns.
std::vector<c10::intrusive_ptr<c10d::Work>> start_many(const ProcessGroupPtr& group,
                                                       Tensors& tensors, int rank) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(at::full({i % 3 == 0 ? 300'000 : 3}, static_cast<double>(rank + i)));
    Tensors one{tensors.back()};
    works.push_back(group->allreduce(one));
  }
  return works;
}

// Ranks may start the calls of different groups in different orders, and wait in any order.
TEST(SharedMemoryTest, CallsOfSeveralGroupsMayBePendingAtOnce) {
  run_group(2, [](int rank) {
    const std::vector<ProcessGroupPtr> groups{dist::default_group(), dist::new_group({0, 1})};
    for (int turn = 0; turn < 5; ++turn) {
      std::vector<Tensors> tensors(2);
      std::vector<std::vector<c10::intrusive_ptr<c10d::Work>>> works(2);
      for (const int i : {0, 1}) {
        const auto which = static_cast<size_t>(rank == 0 ? i : 1 - i);
        works[which] = start_many(groups[which], tensors[which], rank);
      }
      for (const int i : {0, 1}) {
        const auto which = static_cast<size_t>(rank == 0 ? i : 1 - i);
        if (turn % 2 == 1) std::reverse(works[which].begin(), works[which].end());
        for (const auto& work : works[which]) work->wait();
      }
      for (size_t which = 0; which < 2; ++which) {
        for (size_t i = 0; i < tensors[which].size(); ++i) {
          const Tensor& sum = tensors[which][i];
          EXPECT_TRUE(sum.equal(at::full_like(sum, 2.0 * static_cast<double>(i) + 1)));
        }
      }
    }
    for (const auto& group : groups) expect_all_shared(group);
  });
}

TEST(SharedMemoryTest, NobodyHasToWaitForAWork) {
  run_group(2, [](int) {
    const auto group = dist::default_group();
    Tensors dropped{at::ones({300'000})};
    group->allreduce(dropped);
    Tensors polled{at::ones({3})};
    const auto work = group->allreduce(polled);
    while (!work->isCompleted()) ::usleep(1000);
    EXPECT_TRUE(work->isSuccess());
    EXPECT_TRUE(polled[0].equal(at::full({3}, 2.0)));
    EXPECT_TRUE(dropped[0].equal(at::full({300'000}, 2.0)));
    Tensors awaited{at::ones({3})};
    const auto future = group->allreduce(awaited)->getFuture();
    future->wait();
    EXPECT_TRUE(future->value().toTensorVector()[0].equal(at::full({3}, 2.0)));
    expect_all_shared();
  });
}

// gather_rows() creates no work that another thread could drive.
TEST(SharedMemoryTest, RowsGatheredInOneHopWaitForEarlierCalls) {
  run_group(3, [](int rank) {
    const auto group = dist::default_group();
    for (const int64_t elements : {3, 1'000'000}) {
      Tensors summed{at::ones({elements})};
      Tensors also_summed{at::ones({elements})};
      const auto work = group->allreduce(summed);
      const auto future = group->allreduce(also_summed)->getFuture();
      const Tensor rows = dist::detail::gather_rows(at::full({1, 2}, rank, at::kDouble), group);
      EXPECT_TRUE(rows.equal(at::arange(3, at::kDouble).unsqueeze(1).expand({3, 2})));
      work->wait();
      future->wait();
      EXPECT_TRUE(summed[0].equal(at::full({elements}, 3.0)));
      EXPECT_TRUE(also_summed[0].equal(at::full({elements}, 3.0)));
    }
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, RowsGatheredInOneHopFailWhenTheGroupIsShutDown) {
  run_group(2, [](int rank) {
    const auto group = dist::new_group({0, 1});
    if (rank == 0) {
      std::thread other([&group] {
        ::usleep(300'000);  // gather_rows() waits by then
        dist::detail::backend_of(group)->shutdown();
      });
      EXPECT_THAT(message_of<UserError>([&group] {
                    dist::detail::gather_rows(at::ones({1, 2}), group);
                  }),
                  HasSubstr("destroy_process_group()"));
      other.join();
    }
    dist::barrier();
  });
}

/// CPU time of all threads of this process, in seconds.
double processor_time() {
  rusage usage{};
  EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Expects rank 0 to sleep while it waits in `call` for about a second.
void expect_waits_asleep(const std::function<void()>& call) {
  call();  // the first call also sets up
  dist::barrier();
  if (dist::rank() != 0) {
    ::sleep(1);
    return call();
  }
  const double before = processor_time();
  call();
  EXPECT_LT(processor_time() - before, 0.2);
}

TEST(SharedMemoryTest, ARankThatWaitsSleepsAfterAMoment) {
  run_group(2, [](int) {
    // A call of one step, and one of several.
    for (const int64_t size : {3, 300'000}) {
      SCOPED_TRACE(size);
      Tensor tensor = at::ones({size});
      expect_waits_asleep([&] { dist::all_reduce(tensor); });
    }
    // No caller waits for this call: the background thread drives it.
    expect_waits_asleep([] {
      Tensors tensors{at::ones({3})};
      const auto work = dist::default_group()->allreduce(tensors);
      while (!work->isCompleted()) ::usleep(50'000);
    });
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, ARankThatWaitsInASyncBatchNormSleepsAfterAMoment) {
  run_group(2, [](int) {
    dist::SyncBatchNorm layer(3);
    const Tensor input = at::randn({4, 3});
    expect_waits_asleep([&] { layer(input); });
    expect_all_shared(dist::detail::statistics_group({}));
  });
}

TEST(SharedMemoryTest, ACallbackMayCallTheNextCollectiveAndWaitForIt) {
  run_group(2, [](int) {
    const auto group = dist::default_group();
    Tensors first{at::ones({300'000})};
    const auto done = group->allreduce(first)->getFuture()->then(
        [&group](c10::ivalue::Future& future) {
          Tensors second{future.value().toTensorVector()[0]};
          group->allreduce(second)->wait();
          return c10::IValue(second[0]);
        },
        c10::TensorType::get());
    done->waitAndThrow();
    EXPECT_TRUE(done->value().toTensor().equal(at::full({300'000}, 4.0)));
  });
}

// As PowerSGD's hook does in DistributedDataParallel.
TEST(SharedMemoryTest, ACallbackMayWaitForTheFutureOfACollectiveThatItCalls) {
  run_group(2, [](int) {
    const auto group = dist::default_group();
    const auto sum_again = [&group](c10::ivalue::Future& summed) {
      Tensors tensors{summed.value().toTensorVector()[0]};
      const auto again = group->allreduce(tensors)->getFuture();
      again->waitAndThrow();
      return again->value();
    };
    const auto type = c10::ListType::create(c10::TensorType::get());
    for (const int64_t elements : {3, 300'000}) {
      Tensors tensors{at::ones({elements})};
      const auto done =
          group->allreduce(tensors)->getFuture()->then(sum_again, type)->then(sum_again, type);
      done->waitAndThrow();
      EXPECT_TRUE(tensors[0].equal(at::full({elements}, 8.0)));
    }
    expect_all_shared();
  });
}

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// The sum over two ranks of a tensor of ones that takes several steps.
FuturePtr summed(const ProcessGroupPtr& group) {
  Tensors tensors{at::ones({300'000})};
  return group->allreduce(tensors)->getFuture();
}

bool is_sum(const FuturePtr& future) {
  future->waitAndThrow();
  return future->value().toTensorVector()[0].equal(at::full({300'000}, 2.0));
}

FuturePtr then(const FuturePtr& future, std::function<c10::IValue()> callback) {
  return future->then(
      [callback = std::move(callback)](c10::ivalue::Future& /*done*/) { return callback(); },
      future->elementType());
}

/// Rank 0 makes `calls` calls of summed(), some of them in callbacks. Rank 1 makes each of its
/// calls only when rank 0 allows it, so that no call completes before its future has a callback.
/// @param body gets the group and a function that allows rank 1 its next calls
void run_callbacks(
    int calls,
    const std::function<void(const ProcessGroupPtr&, const std::function<void(int)>&)>& body) {
  run_group(2, [&](int rank) {
    const auto group = dist::new_group({0, 1});
    if (rank == 0) {
      return body(group, [](int next) {
        for (; next > 0; --next) dist::barrier();
      });
    }
    for (int call = 0; call < calls; ++call) {
      dist::barrier();
      EXPECT_TRUE(is_sum(summed(group)));
    }
    EXPECT_THROW(dist::barrier(), base::UnavailableError) << "until rank 0 has left";
  });
}

TEST(SharedMemoryTest, ACallbackMayWaitForACollectiveBehindOthersThatHaveCallbacks) {
  for (const bool by_future : {true, false}) {
    run_callbacks(4, [&](const ProcessGroupPtr& group, const std::function<void(int)>& let) {
      const auto waits = then(summed(group), [&] {
        Tensors tensors{at::ones({300'000})};
        const auto work = group->allreduce(tensors);
        by_future ? work->getFuture()->waitAndThrow() : static_cast<void>(work->wait());
        return c10::IValue(tensors);
      });
      std::vector<FuturePtr> behind;
      for (int i = 0; i < 2; ++i) {
        const FuturePtr sum = summed(group);
        behind.push_back(then(sum, [sum] { return sum->value(); }));
      }
      let(4);
      EXPECT_TRUE(is_sum(waits));
      for (const FuturePtr& future : behind) EXPECT_TRUE(is_sum(future));
    });
  }
}

TEST(SharedMemoryTest, CallbacksOfCallbacksMayWaitAtOnce) {
  run_callbacks(3, [](const ProcessGroupPtr& group, const std::function<void(int)>& let) {
    const auto outer = then(summed(group), [&] {
      const auto inner = then(summed(group), [&] {
        const auto innermost = summed(group);
        let(1);
        innermost->waitAndThrow();
        return innermost->value();
      });
      let(1);
      inner->waitAndThrow();
      return inner->value();
    });
    let(1);
    EXPECT_TRUE(is_sum(outer));
  });
}

TEST(SharedMemoryTest, DestroyingTheGroupEndsTheWaitOfACallback) {
  run_callbacks(1, [](const ProcessGroupPtr& group, const std::function<void(int)>& let) {
    std::promise<void> waits;
    const auto done = then(summed(group), [&] {
      const auto never = summed(group);
      waits.set_value();
      never->waitAndThrow();
      return never->value();
    });
    let(1);
    waits.get_future().wait();
    dist::destroy_process_group();
    EXPECT_THAT(message_of<UserError>([&] { done->waitAndThrow(); }),
                AllOf(HasSubstr("all_reduce #2 of group '1' failed"),
                      HasSubstr("this rank has called destroy_process_group()")));
  });
}

TEST(SharedMemoryTest, ACallbackForWhichAnotherOneWaitsMayDestroyTheGroup) {
  run_callbacks(2, [](const ProcessGroupPtr& group, const std::function<void(int)>& let) {
    std::promise<void> waits;
    const auto outer = then(summed(group), [&] {
      const FuturePtr sum = summed(group);
      const auto inner = then(sum, [&waits, sum] {
        waits.get_future().wait();
        dist::destroy_process_group();
        return sum->value();
      });
      let(1);
      waits.set_value();
      inner->waitAndThrow();
      return inner->value();
    });
    let(1);
    EXPECT_TRUE(is_sum(outer));
  });
}

struct Nothing : dist::detail::shm::Operation {
  Nothing() : Operation({}) {}
  void publish(const dist::detail::shm::Step& /*step*/) override {}
  void consume(const dist::detail::shm::Step& /*step*/) override {}
};

// A callback may start an operation while the group shuts down.
TEST(ExchangeTest, AnOperationThatStartsAfterStopFails) {
  namespace shm = dist::detail::shm;
  const shm::Layout layout(1);
  std::vector<shm::Segment> segments;
  segments.push_back(shm::Segment::make(layout).value());
  const auto exchange =
      std::make_shared<shm::Exchange>(layout, std::move(segments), 0, std::vector<int>{0});
  exchange->stop();
  const auto work = exchange->start(c10d::OpType::BARRIER, 1, std::make_unique<Nothing>(),
                                    std::chrono::milliseconds(60'000));
  EXPECT_TRUE(work->isCompleted());
  EXPECT_THAT(message_of<std::runtime_error>([&] { work->getFuture()->waitAndThrow(); }),
              HasSubstr("was aborted"));
}

TEST(SharedMemoryTest, ALargeAndASmallAllReduceAreNamedAsDifferentCalls) {
  run_group(2, [](int rank) {
    Tensor tensor = at::ones({rank == 0 ? 3 : 300'000});
    EXPECT_THAT(message_of<UserError>([&] { dist::all_reduce(tensor); }),
                AllOf(HasSubstr("all_reduce of Float [3] on rank 0 ("),
                      HasSubstr("all_reduce of Float [300000] on rank 1 (")));
  });
}

}  // namespace
}  // namespace syncbn::test

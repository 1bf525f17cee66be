// Collectives between ranks of one host, which pass through shared memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "groups/backend.h"
#include "groups/world.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using at::Tensor;
using c10d::ReduceOp;
using syncbn::base::UserError;
using syncbn::dist::ProcessGroupPtr;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Tensors = std::vector<Tensor>;

dist::detail::Backend& backend(const ProcessGroupPtr& group = dist::default_group()) {
  return *dist::detail::backend_of(group);
}

/// Every call must have gone through shared memory, where there is somebody to share it with.
void expect_all_shared(const ProcessGroupPtr& group = dist::default_group()) {
  EXPECT_EQ(backend(group).shares_memory(), group->getSize() > 1);
  const uint64_t shared = group->getSize() > 1 ? backend(group).sequence() : 0;
  EXPECT_EQ(backend(group).shared_calls(), shared);
}

class SharedMemoryTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SharedMemoryTest, ::testing::Values(1, 2, 3, 4));

// None, one, an odd number, and more than fits into a segment at once.
constexpr int64_t kSizes[] = {0, 1, 7, 20'001, 600'011};

/// What rank r has: small numbers, so that the results fit into every dtype.
Tensor values_of(int rank, int64_t size, at::ScalarType type) {
  const Tensor numbers = at::arange(size, at::kLong).add(rank).remainder(3);
  return type == at::kBool ? numbers.eq(1) : numbers.add(1).to(type);
}

Tensor all_values(int ranks, int64_t size, at::ScalarType type) {
  Tensors all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(values_of(rank, size, type));
  return at::stack(all);
}

Tensor reduced(const Tensor& all, ReduceOp::RedOpType op) {
  const Tensor numbers = all.to(at::isFloatingType(all.scalar_type()) ? at::kFloat : at::kLong);
  const bool is_bool = all.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::SUM:
      return is_bool ? all.any(0) : numbers.sum(0).to(all.scalar_type());
    case ReduceOp::AVG:
      return (numbers.sum(0) / all.size(0)).to(all.scalar_type());
    case ReduceOp::PRODUCT:
      return numbers.prod(0).to(all.scalar_type());
    case ReduceOp::MIN:
      return all.amin(0);
    default:
      return all.amax(0);
  }
}

Tensor all_reduced(const Tensor& own, ReduceOp::RedOpType op = ReduceOp::SUM) {
  Tensors tensors{own.clone()};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  dist::default_group()->allreduce(tensors, options)->wait();
  return tensors[0];
}

TEST_P(SharedMemoryTest, AllReducesEveryDtypeBySumProductMinAndMax) {
  run_ranks(GetParam(), [](int rank) {
    dist::init_process_group();
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                            at::kByte, at::kChar, at::kBool}) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
        for (const int64_t size : kSizes) {
          if (dist::world_size() == 1 && type == at::kBool) continue;  // Gloo's
          SCOPED_TRACE(c10::str(type, " by ", static_cast<int>(op), " of ", size));
          const Tensor sum = all_reduced(values_of(rank, size, type), op);
          EXPECT_TRUE(sum.equal(reduced(all_values(dist::world_size(), size, type), op)));
        }
      }
    }
    expect_all_shared();
  });
}

TEST_P(SharedMemoryTest, AveragesFloatingPointNumbers) {
  if (GetParam() == 1) return;  // Gloo's
  run_ranks(GetParam(), [](int rank) {
    dist::init_process_group();
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const int64_t size : kSizes) {
        const Tensor mean = all_reduced(values_of(rank, size, type), ReduceOp::AVG);
        const Tensor expected = reduced(all_values(dist::world_size(), size, type), ReduceOp::AVG);
        EXPECT_TRUE(at::allclose(mean, expected, 1e-7, 0)) << c10::str(type, " ", size);
      }
    }
    expect_all_shared();
  });
}

TEST_P(SharedMemoryTest, GathersFromAll) {
  run_ranks(GetParam(), [](int rank) {
    dist::init_process_group();
    const int ranks = dist::world_size();
    const auto group = dist::default_group();
    for (const auto type : {at::kFloat, at::kHalf, at::kShort, at::kComplexDouble, at::kByte}) {
      for (const int64_t size : kSizes) {
        // Gloo's own all-gather, in a world of one, knows neither.
        if (ranks == 1 && (type == at::kShort || type == at::kComplexDouble)) continue;
        SCOPED_TRACE(c10::str(type, " of ", size));
        const Tensor all = all_values(ranks, size, type);
        Tensor own = values_of(rank, size, type);
        Tensor rows = at::zeros({ranks * size}, type);
        group->_allgather_base(rows, own)->wait();
        EXPECT_TRUE(rows.equal(all.view(-1)));
        std::vector<Tensors> lists{at::zeros({ranks, size}, type).unbind()};
        Tensors inputs{own};
        group->allgather(lists, inputs)->wait();
        EXPECT_TRUE(at::stack(lists[0]).equal(all));
      }
    }
    expect_all_shared();
  });
}

TEST_P(SharedMemoryTest, BroadcastsFromEveryRoot) {
  run_ranks(GetParam(), [](int rank) {
    dist::init_process_group();
    for (const auto type : {at::kFloat, at::kHalf, at::kByte}) {
      for (const int64_t size : kSizes) {
        for (int root = 0; root < dist::world_size(); ++root) {
          Tensor tensor = values_of(rank, size, type);
          dist::broadcast(tensor, root);
          EXPECT_TRUE(tensor.equal(values_of(root, size, type))) << c10::str(type, " ", size);
        }
      }
    }
    expect_all_shared();
  });
}

TEST(SharedMemoryTest, ABarrierWaitsForAll) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  run_ranks(3, [&](int rank) {
    dist::init_process_group();
    if (rank != 0) {
      ::usleep(200'000);
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

// Gloo would take a tensor with gaps for one without.
TEST(SharedMemoryTest, StridesMayBeAnyAndDifferBetweenRanks) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
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
  run_ranks(4, [](int rank) {
    dist::init_process_group();
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
  run_ranks(3, [](int rank) {
    dist::init_process_group();
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

// Each rank may start the groups' calls in an order of its own, and wait in any.
TEST(SharedMemoryTest, CallsOfSeveralGroupsAreUnderWayAtOnce) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
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
  run_ranks(2, [](int) {
    dist::init_process_group();
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

TEST(SharedMemoryTest, ACallbackMayCallTheNextCollectiveAndWaitForIt) {
  run_ranks(2, [](int) {
    dist::init_process_group();
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

/// The group works, through shared memory or, when any rank is without, for no rank.
void expect_works(bool shared) {
  Tensor tensor = at::ones({70'000});
  dist::all_reduce(tensor);
  EXPECT_TRUE(tensor.equal(at::full({70'000}, static_cast<double>(dist::world_size()))));
  EXPECT_EQ(backend().shares_memory(), shared);
}

TEST(SharedMemoryTest, OneRankTurnsItOffForAll) {
  run_ranks(3, [](int rank) {
    dist::init_process_group({.shared_memory = rank != 1});
    expect_works(false);
    // Of a group without that rank it is no matter.
    const auto others = dist::new_group({0, 2});
    EXPECT_TRUE(!others || backend(others).shares_memory());
  });
}

TEST(SharedMemoryTest, TheEnvironmentTurnsItOff) {
  run_ranks(2, [](int rank) {
    if (rank == 1) ::setenv("SYNCBN_SHARED_MEMORY", "0", 1);
    dist::init_process_group();
    expect_works(false);
  });
  run_ranks(1, [](int) {
    ::setenv("SYNCBN_SHARED_MEMORY", "off", 1);
    EXPECT_THAT(message_of<UserError>([] { dist::init_process_group(); }),
                AllOf(HasSubstr("SYNCBN_SHARED_MEMORY"), HasSubstr("off")));
  });
}

TEST(SharedMemoryTest, ARankWithoutTheMemoryTurnsItOffForAll) {
  run_ranks(2, [](int rank) {
    const rlimit limit{.rlim_cur = 64 << 10, .rlim_max = 64 << 10};
    ASSERT_TRUE(rank == 0 || ::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    dist::init_process_group();
    expect_works(false);
  });
}

bool may_make_namespaces() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWNS | CLONE_NEWPID) == 0 ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0;
}

// As containers have it, only smaller.
TEST(SharedMemoryTest, DevShmMayBeTiny) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks(2, [](int) {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    ASSERT_EQ(::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4096"), 0);
    dist::init_process_group();
    expect_works(true);
  });
}

// As in two containers: the host's name, the network and the boot are the same.
TEST(SharedMemoryTest, RanksThatDoNotSeeEachOthersProcessesUseGloo) {
  SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces");
  run_ranks(2, [](int rank) {
    ASSERT_TRUE(rank == 0 || ::unshare(CLONE_NEWPID) == 0);
    const pid_t child = ::fork();
    if (child != 0) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      return;
    }
    dist::init_process_group();
    expect_works(false);
    dist::barrier();
    std::quick_exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

std::set<std::string> files_in_dev_shm() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

TEST(SharedMemoryTest, NothingIsLeftWhenAllAreKilled) {
  const auto before = files_in_dev_shm();
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    if (rank == 1) ::alarm(60);
    dist::init_process_group();
    expect_works(true);
    ::raise(SIGKILL);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, syncbn::base::kExitSignalBase + SIGKILL) << result.output;
  }
  for (const std::string& name : files_in_dev_shm()) {
    EXPECT_TRUE(before.count(name) != 0 || name.find("syncbn") == std::string::npos) << name;
  }
}

TEST(SharedMemoryTest, ALargeAndASmallAllReduceAreNamedAsDifferentCalls) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    Tensor tensor = at::ones({rank == 0 ? 3 : 300'000});
    EXPECT_THAT(message_of<UserError>([&] { dist::all_reduce(tensor); }),
                AllOf(HasSubstr("all_reduce of Float [3] on rank 0 ("),
                      HasSubstr("all_reduce of Float [300000] on rank 1 (")));
  });
}

}  // namespace

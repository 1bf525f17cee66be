// Ranks on GPUs that fail. The fake NCCL (tests/fake_cuda) does not notice that a peer has died,
// and waits for it on the GPU: the worst that NCCL does.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include <ATen/ops/ones.h>

#include "dist/gpus.h"
#include "dist/group.h"
#include "fake_cuda/nccl_settings.h"
#include "support/environment_guard.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/program.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using syncbn::base::kExitUnavailable;
using syncbn::base::kExitUsage;
using syncbn::base::UserError;
using syncbn::test::gpus;
using syncbn::test::message_of;
using syncbn::test::RankResult;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using syncbn::test::run_program;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Clock = std::chrono::steady_clock;

at::Tensor ones(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::ones(sizes, at::TensorOptions(type).device(dist::device()));
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// Waits for the device's work, then reports errors of the group, as a training loop does.
void wait_for(const at::Tensor& tensor) {
  static_cast<void>(tensor.cpu());
  dist::throw_if_aborted();
}

/// Creates a group over NCCL, and returns the result of an all-reduce in it.
at::Tensor sum_of_new_group(milliseconds timeout = dist::InitOptions().timeout) {
  dist::init_process_group({.backend = "nccl", .timeout = timeout});
  at::Tensor value = ones({3});
  dist::all_reduce(value);
  wait_for(value);
  return value;
}

/// Ends rank 1 after this time, without leaving the group.
void end_rank_1(int rank, seconds after) {
  if (rank != 1) return;
  std::this_thread::sleep_for(after);  // so that rank 0's call fails for another reason
  ::_exit(0);
}

// Jobs of a launcher, which restarts the ranks.

struct Fault {
  const char* what;
  const char* place;
  const char* report;  ///< how the launcher reports the rank that failed first
  const char* rank = "1";
  const char* says = "";  ///< part of the rank's message
};

std::string name_of(const ::testing::TestParamInfo<Fault>& info) {
  std::string name =
      fmt::format("{}_in_{}_of_rank_{}", info.param.what, info.param.place, info.param.rank);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class GpuFaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(GpuFaultTest, EndsAllWorkersInTimeAndTheRestartTrains) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  const Fault fault = GetParam();
  const bool stops = std::string(fault.what) == "stop";
  const syncbn::test::Environment connects_late("FAKE_NCCL_RUNTIME_CONNECT", "1");
  const syncbn::test::TempFolder folder;
  const auto launched = run_program(
      {SYNCBN_BIN_DIR "/syncbn-launch", "--standalone", "--nproc_per_node=2", "--max_restarts=1",
       SYNCBN_GPU_FAULT_WORKER, fault.what, fault.place, fault.rank, folder.path()});
  const std::string text = launched.out + launched.err;
  EXPECT_EQ(launched.exit_code, 0) << text;
  EXPECT_THAT(launched.out, AllOf(HasSubstr("rank 0 has trained"), HasSubstr("rank 1 has trained")))
      << text;
  EXPECT_EQ(count(text, " failed: "), 1 + count(text, "error: rank ")) << text;
  EXPECT_THAT(launched.err, HasSubstr(fault.report)) << text;
  EXPECT_LE(count(text, "error: "), 1) << text;
  EXPECT_THAT(text, HasSubstr(fault.says));
  // From the fault in the first attempt to the second attempt. The timeout of the group is 3 s.
  const auto took = fs::last_write_time(folder / "restart") - fs::last_write_time(folder / "fault");
  EXPECT_LT(took, seconds(stops ? 3 + 10 : 10)) << text;
  fmt::print("{} in {}: {:.1f} s\n", fault.what, fault.place,
             std::chrono::duration<double>(took).count());
}

constexpr char kKilled[] = "rank 1 failed: killed by signal 9";
constexpr char kThrew[] = "rank 1 failed: exit code 70";
constexpr char kStopped[] = "rank 0 failed: exit code 75";

// Each fault and each place, and also a failing rank 0.
INSTANTIATE_TEST_SUITE_P(
    All, GpuFaultTest,
    ::testing::Values(
        Fault{"throw", "forward", kThrew}, Fault{"throw", "new-group", kThrew},
        Fault{"memory", "backward", kThrew}, Fault{"throw", "checkpoint", kThrew},
        Fault{"memory", "set-up", "rank 1 failed: exit code 75", "1", "out of memory"},
        Fault{"kill", "set-up", kKilled}, Fault{"kill", "checkpoint", kKilled},
        Fault{"kill", "first-backward", kKilled},
        Fault{"kill", "backward", "rank 0 failed: killed by signal 9", "0"},
        Fault{"stop", "first-forward", kStopped}, Fault{"stop", "backward", kStopped},
        Fault{"stop", "set-up", kStopped, "1", "NCCL has not connected within 3000 ms"}),
    name_of);
INSTANTIATE_TEST_SUITE_P(
    Exhaustive, GpuFaultTest,
    ::testing::Values(Fault{"throw", "backward", kThrew}, Fault{"memory", "forward", kThrew},
                      Fault{"memory", "checkpoint", kThrew}, Fault{"kill", "forward", kKilled},
                      Fault{"kill", "backward", kKilled},
                      Fault{"throw", "forward", "rank 0 failed: exit code 70", "0"},
                      Fault{"throw", "first-forward", kThrew}, Fault{"stop", "forward", kStopped},
                      Fault{"stop", "checkpoint", kStopped}),
    name_of);

// Ranks that a program starts without a launcher.

/// Runs two ranks; rank 1 is killed before it takes part in an all-reduce.
/// @return the result of rank 0
RankResult rank_0_beside_a_killed_one(const std::function<void(at::Tensor&)>& body) {
  return run_ranks_and_collect({.world_size = 2}, [&](int rank) {
    at::Tensor value = sum_of_new_group();
    if (rank == 1) ::raise(SIGKILL);
    body(value);
  })[0];
}

TEST(GpuFailureTest, TheCallThatWaitedForADeadRankIsNamedAfterTheWaitForTheGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  const syncbn::test::Environment job("SYNCBN_JOB_ID", "job7");
  const RankResult rank_0 = rank_0_beside_a_killed_one([](at::Tensor& value) {
    const auto begin = Clock::now();
    dist::all_reduce(value);
    const std::string message = message_of<dist::PeerError>([&] { wait_for(value); });
    EXPECT_THAT(message,
                AllOf(HasSubstr("rank 0 of 2 on "), HasSubstr("all_reduce #2 of group"),
                      HasSubstr("rank 1 ("), HasSubstr(") died"), HasSubstr("(NCCL's calls: "),
                      HasSubstr("torch/comm_lib_trace_job7_rank_0)")));
    const std::string mark = "(NCCL's calls: ";
    const std::string file = message.substr(message.find(mark) + mark.size());
    EXPECT_THAT(syncbn::base::read_file(file.substr(0, file.find(')'))),
                AllOf(HasSubstr("nccl:all_reduce"), HasSubstr("scheduled")));
    // Later calls fail for the same reason, and the rank can still leave the group.
    EXPECT_EQ(message_of<dist::PeerError>([&] { dist::all_reduce(value); }), message);
    dist::destroy_process_group();
    EXPECT_LT(Clock::now() - begin, seconds(5));
  });
  EXPECT_EQ(rank_0.exit_code, 0) << rank_0.output;
}

TEST(GpuFailureTest, ALayerThatWaitedForADeadRankIsNamed) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  const auto ranks = run_group_and_collect(2, {.backend = "nccl"}, [&](int rank) {
    dist::SyncBatchNorm norm(dist::SyncBatchNormOptions(3).name("norm"));
    norm->to(dist::device());
    wait_for(norm(ones({4, 3})));
    if (rank == 1) ::raise(SIGKILL);
    EXPECT_THAT(
        message_of<dist::PeerError>([&] {
          wait_for(norm(ones({4, 3})));
        }),
        AllOf(HasSubstr("SyncBatchNorm layer 'norm'"), HasSubstr("rank 1 ("), HasSubstr(") died")));
  });
  EXPECT_EQ(ranks[0].exit_code, 0) << ranks[0].output;
}

TEST(FakeGpuFailureTest, AnErrorOfTheConnectionIsTheDeathOfTheRankAsWell) {
  const syncbn::test::Environment sockets("FAKE_NCCL_DEAD_PEER", "remote_error");
  const RankResult rank_0 = rank_0_beside_a_killed_one([](at::Tensor& value) {
    dist::all_reduce(value);
    EXPECT_THAT(message_of<dist::PeerError>([&] { wait_for(value); }), HasSubstr(") died"));
    const auto begin = Clock::now();
    dist::destroy_process_group();
    EXPECT_LT(Clock::now() - begin, seconds(5));
  });
  EXPECT_EQ(rank_0.exit_code, 0) << rank_0.output;
}

TEST(FakeGpuFailureTest, AbortsThatWaitForEachOtherEnd) {
  const syncbn::test::Environment waits("FAKE_NCCL_ABORT", "device");
  const RankResult rank_0 = rank_0_beside_a_killed_one([](at::Tensor& value) {
    dist::SyncBatchNorm norm(dist::SyncBatchNormOptions(3).name("norm"));
    norm->to(dist::device());
    dist::all_reduce(value);
    EXPECT_THAT(message_of<dist::PeerError>([&] { wait_for(value); }), HasSubstr(") died"));
  });
  EXPECT_EQ(rank_0.exit_code, 0) << rank_0.output;
}

TEST(FakeGpuFailureTest, AProcessThatNcclDoesNotLetGoSaysWhyAndEnds) {
  const syncbn::test::Environment hangs("FAKE_NCCL_ABORT", "hang");
  const auto begin = Clock::now();
  const RankResult rank_0 = rank_0_beside_a_killed_one([](at::Tensor& value) {
    dist::all_reduce(value);
    static_cast<void>(value.cpu());  // never returns
  });
  EXPECT_EQ(rank_0.exit_code, kExitUnavailable) << rank_0.output;
  EXPECT_THAT(rank_0.output, AllOf(HasSubstr("all_reduce #2 of group"), HasSubstr(") died"),
                                   HasSubstr("NCCL does not return, so this process ends")));
  EXPECT_EQ(count(rank_0.output, "died"), 1);
  EXPECT_LT(Clock::now() - begin, seconds(10));
}

TEST(GpuFailureTest, ATimeoutOfACallHoldsAndNamesTheRankThatIsMissing) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int rank) {
    at::Tensor value = sum_of_new_group();
    end_rank_1(rank, seconds(4));
    const auto begin = Clock::now();
    dist::all_reduce(value, c10d::ReduceOp::SUM, {}, seconds(1));
    EXPECT_THAT(message_of<dist::PeerError>([&] { wait_for(value); }),
                AllOf(HasSubstr("all_reduce #2 of group"), HasSubstr("timed out after 1000 ms"),
                      HasSubstr("rank 1 ("), HasSubstr("has not called it")));
    EXPECT_LT(Clock::now() - begin, seconds(4));
    EXPECT_GE(Clock::now() - begin, seconds(1));
  });
}

TEST(GpuFailureTest, ATimeoutOfAWaitAbortsTheGroup) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int rank) {
    at::Tensor value = sum_of_new_group();
    end_rank_1(rank, seconds(5));
    const auto begin = Clock::now();
    const auto work = dist::all_reduce_async(value);
    EXPECT_THAT(message_of<dist::PeerError>([&] { work->wait(seconds(1)); }),
                AllOf(HasSubstr("all_reduce #2 of group"), HasSubstr("timed out after 1000 ms"),
                      HasSubstr("has not called it")));
    EXPECT_THROW(dist::throw_if_aborted(), dist::PeerError);
    static_cast<void>(value.cpu());  // the abort has ended the kernel
    EXPECT_LT(Clock::now() - begin, seconds(4));
  });
}

TEST(GpuFailureTest, AGroupIsLeftThoughAPeerEndsWithoutLeaving) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int rank) {
    sum_of_new_group();
    end_rank_1(rank, seconds(0));
    const auto begin = Clock::now();
    dist::destroy_process_group();
    EXPECT_LT(Clock::now() - begin, seconds(6));
  });
}

TEST(FakeGpuFailureTest, ADeadRankIsNamedThoughTheGpuDoesNotAnswer) {
  const RankResult rank_0 = rank_0_beside_a_killed_one([](at::Tensor& value) {
    ::setenv("FAKE_CUDA_QUERY_HANGS", "1", 1);
    dist::all_reduce(value);
    EXPECT_THAT(message_of<dist::PeerError>([&] { wait_for(value); }), HasSubstr(") died"));
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);  // libtorch's watchdog hangs as well
  });
  EXPECT_EQ(rank_0.exit_code, 0) << rank_0.output;
}

TEST(FakeGpuFailureTest, AnErrorWithinNcclIsToldInItsWords) {
  run_ranks(2, [](int rank) {
    at::Tensor value = sum_of_new_group();
    end_rank_1(rank, seconds(6));
    dist::all_reduce(value);
    const auto begin = Clock::now();
    ::setenv("FAKE_NCCL_ASYNC_ERROR", "1", 1);
    EXPECT_THAT(message_of<dist::PeerError>([&] { wait_for(value); }),
                AllOf(HasSubstr("all_reduce #2 of group"),
                      HasSubstr("NCCL error: unhandled system error"), HasSubstr("error 12")));
    EXPECT_LT(Clock::now() - begin, seconds(5));
  });
}

TEST(FakeGpuFailureTest, AFailureOfNcclOnThisRankIsNotBlamedOnOthers) {
  run_ranks(2, [](int rank) {
    at::Tensor value = sum_of_new_group();
    end_rank_1(rank, seconds(4));
    ::setenv("FAKE_NCCL_CUDA_ERROR", "1", 1);
    EXPECT_THAT(message_of<syncbn::base::InternalError>([&] { dist::all_reduce(value); }),
                AllOf(HasSubstr("NCCL failed on this rank: "), HasSubstr("out of memory"),
                      Not(HasSubstr("Another rank"))));
  });
}

TEST(FakeGpuFailureTest, RanksThatLeaveLetTheirCallsEnd) {
  const syncbn::test::Environment devices("FAKE_CUDA_DEVICES", "3");
  run_ranks(3, [](int rank) {
    at::Tensor value = sum_of_new_group();
    if (rank == 2) std::this_thread::sleep_for(seconds(1));  // the others leave meanwhile
    dist::all_reduce(value);
    dist::destroy_process_group();
    EXPECT_EQ(value[0].item<float>(), 9);
  });
}

TEST(FakeGpuFailureTest, WhatARankHasSentBeforeItLeavesIsReceived) {
  const syncbn::test::Environment devices("FAKE_CUDA_DEVICES", "3");
  run_group(3, {.backend = "nccl"}, [](int rank) {
    const auto late = dist::new_group({1, 2});
    at::Tensor value = ones({3}) * rank;
    dist::all_reduce(value);
    wait_for(value);
    if (rank == 2) std::this_thread::sleep_for(seconds(1));
    // Rank 1 leaves while its send waits on the GPU, behind a call in which rank 2 is late.
    if (rank > 0) dist::all_reduce(value, c10d::ReduceOp::SUM, late);
    if (rank == 1) dist::send(value, 0);
    if (rank == 0) {
      dist::recv(value, 1);
      wait_for(value);
      EXPECT_EQ(value[0].item<float>(), 6);
    }
    dist::destroy_process_group();
  });
}

// Ranks that make different calls.

/// @param body runs on two ranks; must fail with `says`
void expect_disagreement(const std::function<void(int rank)>& body,
                         const ::testing::Matcher<std::string>& says) {
  const auto begin = Clock::now();
  const auto ended = run_group_and_collect(2, {.backend = "nccl"}, [&](int rank) { body(rank); });
  EXPECT_LT(Clock::now() - begin, seconds(5));
  for (const RankResult& rank : ended) {
    EXPECT_EQ(rank.exit_code, kExitUsage) << rank.output;
    EXPECT_THAT(rank.output, says);
  }
}

dist::SyncBatchNorm layer(const char* name, int64_t channels) {
  dist::SyncBatchNorm made(dist::SyncBatchNormOptions(channels).name(name));
  made->to(dist::device());
  return made;
}

TEST(GpuDisagreementTest, LayersOfDifferentWidthsAreNamed) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  expect_disagreement(
      [](int rank) {
        auto norm = layer("norm", 3 + rank);
        wait_for(norm(ones({4, 3 + rank}) * 2));
      },
      AllOf(HasSubstr("SyncBatchNorm layer 'norm' (3 channels, Float)"),
            HasSubstr("SyncBatchNorm layer 'norm' (4 channels, Float)")));
}

TEST(GpuDisagreementTest, DifferentDtypesOfALayerAreNamed) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  expect_disagreement(
      [](int rank) {
        auto norm = layer("norm", 3);
        const auto type = rank == 0 ? at::kFloat : at::kDouble;
        for (int step = 0; step < 40; ++step) wait_for(norm(ones({4, 3}, type)));
      },
      AllOf(HasSubstr("Float"), HasSubstr("Double")));
}

TEST(GpuDisagreementTest, DifferentCollectivesAreNamed) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  expect_disagreement(
      [](int rank) {
        at::Tensor value = ones({3 + rank});
        dist::all_reduce(value);
        wait_for(value);
      },
      AllOf(HasSubstr("all_reduce of Float [3]"), HasSubstr("all_reduce of Float [4]")));
}

TEST(GpuDisagreementTest, WhatNcclRefusesIsTheUsersMistake) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_group(2, {.backend = "nccl"}, [](int /*rank*/) {
    at::Tensor value = ones({3}, at::kLong);
    EXPECT_THAT(message_of<UserError>([&] { dist::all_reduce(value, c10d::ReduceOp::BAND); }),
                AllOf(HasSubstr("was refused"), HasSubstr("BAND")));
    dist::all_reduce(value);
    EXPECT_EQ(value[0].item<int64_t>(), 2);
    dist::destroy_process_group();
  });
}

}  // namespace

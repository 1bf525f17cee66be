#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dist/group.h"
#include "monitor/flight_recorder.h"
#include "monitor/monitor_channel.h"
#include "monitor/peer_monitor.h"
#include "support/multiproc.h"
#include "support/program.h"
#include "support/thrown.h"
#include "transport/group_abort.h"
#include "transport/no_sigpipe.h"

// The groups of these tests have the default timeout of half an hour: a call that ends sooner was
// aborted because of a rank.

namespace {

namespace dist = syncbn::dist;
using at::Tensor;
using std::chrono::milliseconds;
using syncbn::base::kExitSignalBase;
using syncbn::base::kExitUnavailable;
using syncbn::base::kExitUsage;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::dist::detail::FlightRecorder;
using syncbn::dist::detail::MonitorChannel;
using syncbn::dist::detail::PeerMonitor;
using syncbn::test::message_of;
using syncbn::test::RankResult;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kKilled = kExitSignalBase + SIGKILL;

/// Every rank but `dead` must name the call that failed and the dead rank as the cause.
void expect_named(const std::vector<RankResult>& results, size_t dead, const std::string& call) {
  EXPECT_EQ(results[dead].exit_code, kKilled) << results[dead].output;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (rank == dead) continue;
    EXPECT_EQ(results[rank].exit_code, kExitUnavailable) << rank << ": " << results[rank].output;
    EXPECT_THAT(results[rank].output,
                AllOf(HasSubstr("rank " + std::to_string(rank) + " of "),
                      HasSubstr(call + " failed"), HasSubstr("rank " + std::to_string(dead) + " ("),
                      HasSubstr(") died"), Not(HasSubstr("Connection closed"))));
  }
}

void sum(int64_t size = 3) {
  Tensor tensor = at::ones({size});
  dist::all_reduce(tensor);
}

class DeadRank : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(DeadRank, EndsAnAllReduceOfAllTheOthers) {
  const auto [world_size, dead] = GetParam();
  const auto results = run_group_and_collect(world_size, [dead = dead](int rank) {
    sum();
    if (rank == dead) ::raise(SIGKILL);
    const auto before = std::chrono::steady_clock::now();
    try {
      sum();
    } catch (const UnavailableError&) {
      // Within a second on an idle machine. Only waiting for a timeout takes this long.
      const auto time = std::chrono::steady_clock::now() - before;
      if (time > std::chrono::seconds(60)) throw std::runtime_error("seen after more than 60 s");
      throw;
    }
  });
  expect_named(results, static_cast<size_t>(dead), "all_reduce #2 of group '0'");
}

INSTANTIATE_TEST_SUITE_P(FaultTest, DeadRank,
                         ::testing::Values(std::pair(2, 0), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 0), std::pair(4, 2)));

/// Joins as one of several ranks in this process.
std::shared_ptr<PeerMonitor> join(c10d::Store& store, int rank, int world_size) {
  return PeerMonitor::join(store, rank, world_size, "127.0.0.1", milliseconds(20'000));
}

// The launcher reports the first failure that it sees.
TEST(PeerMonitorTest, SurvivorsWaitUntilAProcessThatEndedIsGone) {
  run_ranks(1, [](int) {
    c10d::HashStore store;
    const auto survivor = join(store, 0, 2);
    FlightRecorder log("group", {0, 1}, [](auto) {});
    const auto before = std::chrono::steady_clock::now();
    join(store, 1, 2).reset();
    dist::detail::Call call;
    call.sequence = 1;
    const auto cause = survivor->cause_of(log, call, "lost", /*timed_out=*/false);
    EXPECT_THAT(cause.text, AllOf(HasSubstr("rank 1 ("), HasSubstr("has left the group")));
    EXPECT_GE(std::chrono::steady_clock::now() - before, milliseconds(200));
  });
}

// Other errors may have a similar text: "Connection timed out" is the error for a lost host.
TEST(PeerMonitorTest, OnlyAfterATimeoutAreRanksAskedHowFarTheyAre) {
  run_ranks(1, [](int) {
    c10d::HashStore store;
    const auto asking = join(store, 0, 2);
    const auto other = join(store, 1, 2);
    dist::detail::Call call;
    call.sequence = 1;
    FlightRecorder lost("lost", {0, 1}, [](auto) {});
    EXPECT_EQ(asking->cause_of(lost, call, "Connection timed out", /*timed_out=*/false).text, "");
    FlightRecorder late("late", {0, 1}, [](auto) {});
    EXPECT_THAT(asking->cause_of(late, call, "too late", /*timed_out=*/true).text,
                AllOf(HasSubstr("too late; rank 1 ("), HasSubstr(") has not called it")));
  });
}

// More than the buffers of the connection hold: rank 0 is busy and reads later.
TEST(PeerMonitorTest, ALeaveNoticeOfAnyLengthArrives) {
  run_ranks(1, [](int) {
    c10d::HashStore store;
    MonitorChannel zero(store, 0, 2, "127.0.0.1", milliseconds(20'000));
    auto leaver = join(store, 1, 2);
    std::vector<std::shared_ptr<FlightRecorder>> logs;
    for (int group = 0; group < 60; ++group) {
      logs.push_back(std::make_shared<FlightRecorder>(std::string(100'000, 'g'), std::vector{0, 1},
                                                      [](auto) {}));
      leaver->add(logs.back());
    }
    std::thread leave([&] { leaver.reset(); });
    std::string said;
    std::promise<std::string> said_last;
    zero.start({.message = [&](const auto& message) { said = message.type; },
                .end = [&](int, const std::string&) { said_last.set_value(said); },
                .tick = [] {}});
    leave.join();
    EXPECT_EQ(said_last.get_future().get(), "leave");
  });
}

TEST(PeerMonitorTest, AChildThatEndsDoesNotTakeItsRankAlong) {
  run_group(2, [](int) {
    const pid_t child = ::fork();
    if (child == 0) std::exit(0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    sum();
  });
}

// In about every second of these forks, another thread holds the monitor's lock.
TEST(PeerMonitorTest, AChildThatEndsDoesNotWaitForAThreadThatIsNotThere) {
  run_ranks(1, [](int) {
    c10d::HashStore store;
    const auto monitor = join(store, 0, 1);
    std::atomic<bool> stop = false;
    std::thread user([&] {
      while (!stop) monitor->add(nullptr);
    });
    for (int i = 0; i < 10 && !::testing::Test::HasFailure(); ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(10);  // ends one that hangs
        std::exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
    stop = true;
    user.join();
  });
}

TEST(NoSigpipeTest, WritingToNobodyIsAnErrorOfThisThreadAndLeavesNothingBehind) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  sigset_t before;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  {
    const dist::detail::NoSigpipe none;
    EXPECT_EQ(::write(ends[1], "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
  }
  sigset_t after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  EXPECT_EQ(::sigismember(&after, SIGPIPE), ::sigismember(&before, SIGPIPE));
  ::close(ends[1]);
}

// In Gloo's barrier, ranks wait for ranks that wait themselves: they would never notice.
TEST(FaultTest, ADeadRankEndsABarrier) {
  const auto results = run_group_and_collect(4, [](int rank) {
    sum();  // until all are connected
    if (rank == 3) ::raise(SIGKILL);
    dist::barrier();
  });
  expect_named(results, 3, "barrier #2 of group '0'");
}

TEST(FaultTest, ADeadRankEndsARecvFromItOnly) {
  const auto results = run_group_and_collect(3, [](int rank) {
    dist::barrier();  // until all are connected
    Tensor tensor = at::zeros({4});
    if (rank == 2) ::raise(SIGKILL);
    if (rank == 0) {
      EXPECT_THAT(
          message_of<UnavailableError>([&] { dist::recv(tensor, 2); }),
          AllOf(HasSubstr("recv #1 from rank 2 of group '0' failed: rank 2 ("), HasSubstr("died")));
    }
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
}

TEST(FaultTest, TwoRanksGoOnWithoutAThirdThatTheyDoNotNeed) {
  int ended[2];
  ASSERT_EQ(::pipe(ended), 0);
  const auto results = run_group_and_collect(3, [&](int rank) {
    const auto pair = dist::new_group({0, 1});
    dist::barrier();
    if (rank == 2) ::raise(SIGKILL);
    Tensor tensor = at::full({4}, rank + 1.0);
    if (rank == 1) {
      ::usleep(1'500'000);  // rank 0 waits longer than it takes to notice that rank 2 has ended
      dist::send(tensor, 0);
    } else {
      dist::recv(tensor, 1);
      EXPECT_TRUE(tensor.equal(at::full({4}, 2.0)));
    }
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, pair);
    EXPECT_TRUE(tensor.equal(at::full({4}, 4.0)));
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
  EXPECT_EQ(results[1].exit_code, 0) << results[1].output;
}

TEST(FaultTest, ADeadRankEndsABackwardOfDistributedDataParallel) {
  const auto results = run_group_and_collect(3, [](int rank) {
    dist::DistributedDataParallel<torch::nn::LinearImpl> ddp(torch::nn::Linear(8, 4));
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = ddp(at::ones({2, 8})).sum();
      if (step == 2 && rank == 1) ::raise(SIGKILL);
      loss.backward();
    }
  });
  expect_named(results, 1, "of group '0'");
  EXPECT_THAT(results[0].output, HasSubstr("all_reduce #"));
}

TEST(FaultTest, ARankThatEndedWithACodeIsNamedWithIt) {
  const auto results = run_group_and_collect(3, [](int rank) {
    sum();  // until all are connected
    if (rank == 1) std::exit(7);
    sum();
  });
  EXPECT_EQ(results[1].exit_code, 7);
  for (const size_t rank : {0U, 2U}) {
    EXPECT_EQ(results[rank].exit_code, kExitUnavailable);
    EXPECT_THAT(results[rank].output, AllOf(HasSubstr("all_reduce #2"), HasSubstr("rank 1 ("),
                                            HasSubstr(") ended with exit code 7")));
  }
}

TEST(FaultTest, RanksOfASmallerGroupAreNamedAsInTheWorld) {
  const auto results = run_group_and_collect(4, [](int rank) {
    const auto group = dist::new_group({1, 3});
    dist::barrier();  // until all are connected
    if (rank == 3) ::raise(SIGKILL);
    if (rank != 1) return dist::barrier();  // rank 0 has to be there to pass the message on
    Tensor tensor = at::ones({3});
    dist::all_reduce(tensor, c10d::ReduceOp::SUM, group);
  });
  EXPECT_EQ(results[1].exit_code, kExitUnavailable);
  EXPECT_THAT(results[1].output,
              AllOf(HasSubstr("rank 1 of 4 on "), HasSubstr("all_reduce #1 of group '1' failed"),
                    HasSubstr("rank 3 ("), HasSubstr(") died")));
}

TEST(FaultTest, ARankThatDestroyedItsGroupIsNamed) {
  for (const int left : {0, 1}) {  // rank 0 holds the store and passes messages on
    run_group(3, [left](int rank) {
      sum();
      if (rank == left) return dist::destroy_process_group();
      EXPECT_THAT(
          message_of<UnavailableError>([] { sum(); }),
          AllOf(HasSubstr("all_reduce #2"), HasSubstr("rank " + std::to_string(left) + " ("),
                HasSubstr("has left the group (destroy_process_group)")));
    });
  }
}

TEST(FaultTest, ARankThatDoesNotCallIsNamedAfterTheTimeout) {
  int done[2];
  ASSERT_EQ(::pipe(done), 0);
  const auto results = run_group_and_collect(3, {.timeout = milliseconds(4000)}, [&](int rank) {
    sum();
    if (rank == 1) {  // is busy until the others have given up
      char byte = 0;
      ASSERT_EQ(::read(done[0], &byte, 1), 1);
      ASSERT_EQ(::read(done[0], &byte, 1), 1);
      return;
    }
    const std::string message = message_of<UnavailableError>([] { sum(); });
    EXPECT_THAT(message, AllOf(HasSubstr("all_reduce #2 of group '0' failed"), HasSubstr("4000ms"),
                               HasSubstr("rank 1 ("),
                               HasSubstr("has not called it: its last call "
                                         "is all_reduce of Float [3] #1")));
    ASSERT_EQ(::write(done[1], "1", 1), 1);
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(FaultTest, AStoppedRankIsNamedAfterTheTimeout) {
  int pids[2];
  int done[2];
  ASSERT_EQ(::pipe(pids), 0);
  ASSERT_EQ(::pipe(done), 0);
  const auto results = run_group_and_collect(3, {.timeout = milliseconds(4000)}, [&](int rank) {
    sum();
    if (rank == 2) {
      const pid_t own = ::getpid();
      ASSERT_EQ(::write(pids[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
      ::raise(SIGSTOP);
      return;
    }
    const std::string message = message_of<UnavailableError>([] { sum(); });
    EXPECT_THAT(message, AllOf(HasSubstr("all_reduce #2 of group '0' failed"), HasSubstr("4000ms"),
                               HasSubstr("rank 2 does not answer: it is stopped")));
    char byte = 0;
    if (rank == 1) {
      ASSERT_EQ(::write(done[1], &byte, 1), 1);
    } else {
      ASSERT_EQ(::read(done[0], &byte, 1), 1);
      pid_t stopped = 0;
      ASSERT_EQ(::read(pids[0], &stopped, sizeof(stopped)), static_cast<ssize_t>(sizeof(stopped)));
      ::kill(stopped, SIGCONT);
    }
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(FaultTest, AFailureOfItsOwnIsWhatARankEndsWith) {
  const auto results = run_group_and_collect(3, [](int rank) {
    sum();
    if (rank == 2) throw UserError("the data of rank 2 is bad");
    sum();
  });
  EXPECT_EQ(results[2].exit_code, kExitUsage);
  for (const size_t rank : {0U, 1U}) {
    EXPECT_EQ(results[rank].exit_code, kExitUnavailable);
    EXPECT_THAT(results[rank].output, AllOf(HasSubstr("all_reduce #2"), HasSubstr("rank 2 (")));
  }
}

// The last collective of one rank need not be the last one of the others.
TEST(PeerMonitorTest, RanksThatEndOneAfterAnotherAreNoFailure) {
  run_group(4, [](int rank) {
    sum();
    Tensor tensor = at::full({4}, rank == 0 ? 5.0 : 0.0);
    if (rank == 3) ::usleep(1'500'000);  // the others end meanwhile
    dist::broadcast(tensor, 0);
    EXPECT_TRUE(tensor.equal(at::full({4}, 5.0)));
    dist::destroy_process_group();
  });
}

// A loader's process, forked from a rank, could otherwise keep the rank's connection open.
TEST(FaultTest, AChildThatOutlivesItsRankDoesNotHideItsEnd) {
  int others_live[2];
  ASSERT_EQ(::pipe(others_live), 0);
  const auto results = run_group_and_collect(3, [&](int rank) {
    sum();
    if (rank == 2) {
      if (::fork() == 0) {
        ::close(STDOUT_FILENO);  // the test waits until stdout is closed
        ::close(STDERR_FILENO);
        ::close(others_live[1]);
        char byte = 0;
        [[maybe_unused]] const ssize_t end = ::read(others_live[0], &byte, 1);
        ::_exit(0);
      }
      ::raise(SIGKILL);
    }
    sum();
  });
  for (const int end : others_live) ::close(end);
  EXPECT_EQ(results[0].exit_code, kExitUnavailable);
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("rank 2 ("), HasSubstr("died")));
}

TEST(FaultTest, ARankThatDiesInTheMiddleOfAMessageEndsTheOthers) {
  const auto results = run_group_and_collect(2, [](int rank) {
    Tensor values = at::zeros({32 << 20});  // 128 MiB, which take about 0.1 s
    dist::all_reduce(values);
    std::thread killer;
    if (rank == 1) {
      killer = std::thread([] {
        ::usleep(50'000);
        ::raise(SIGKILL);
      });
    }
    for (;;) dist::all_reduce(values);
  });
  EXPECT_EQ(results[0].exit_code, kExitUnavailable) << results[0].output;
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("rank 1 ("), HasSubstr("died")));
}

// Like Gloo after a connection broke in the middle of a message.
class DeafTransport : public dist::detail::Transport {
 public:
  c10d::Backend& prepare(const dist::detail::Call& /*call*/) override {
    throw std::logic_error("no calls");
  }
  void set_timeout(std::chrono::milliseconds /*timeout*/) override {}
  void abort() override {}
  void shutdown() override {}
};

TEST(GroupAbortTest, EndsTheProcessIfACallOnTheCpuDoesNotEnd) {
  using dist::detail::GroupAbort;
  std::string what;
  GroupAbort group(std::make_shared<DeafTransport>(), nullptr);
  group.set_last_resort([&](const char* deaf) {
    what = deaf;
    std::thread([&] { group.start(); }).join();  // no lock is held
  });
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto since = now();
  group.start(since);
  // Past the limit, which holds only while somebody waits.
  std::this_thread::sleep_for(GroupAbort::kCpuLimit + std::chrono::milliseconds(100));
  group.start();
  EXPECT_EQ(what, "") << "nobody waits";
  group.start(now());
  EXPECT_EQ(what, "") << "the wait has just begun";
  group.start(since);
  EXPECT_EQ(what, "the aborted call");
}

TEST(PeerMonitorTest, ThirtyTwoRanksComeAndGo) {
  const auto results = run_group_and_collect(32, [](int rank) {
    sum();
    if (rank == 17) ::raise(SIGKILL);
    sum();
  });
  expect_named(results, 17, "all_reduce #2 of group '0'");
}

// The survivors report only when the dead process is gone, so the launcher sees its end first.
TEST(FaultTest, TheLauncherReportsTheRankThatDiedAndNotThoseThatNoticed) {
  const auto result = syncbn::test::run_program(
      {SYNCBN_BIN_DIR "/syncbn-launch", "--nproc_per_node=4", SYNCBN_LOST_RANK_WORKER},
      {.env = {{"OMP_NUM_THREADS", "1"}}});
  EXPECT_EQ(result.exit_code, kKilled) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed: killed by signal 9"));
}

}  // namespace

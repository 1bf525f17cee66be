#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/base/held_port.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>

#include "support/affinity.h"
#include "support/environment_guard.h"
#include "support/program.h"
#include "support/text.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SpawnError;
using std::chrono::milliseconds;
using syncbn::base::UnavailableError;
using syncbn::base::UserError;
using syncbn::test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// The error of spawn(); fails the test if there is none.
template <class Body>
SpawnError error_of(int nprocs, Body body, const dist::SpawnOptions& options = {}) {
  try {
    dist::spawn(body, nprocs, options);
  } catch (const SpawnError& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {-1, -1, ""};
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

TEST(SpawnTest, RanksThatWouldStallTheMachineAreRefused) {
  EXPECT_THAT(message_of<syncbn::base::UserError>([] { dist::spawn([](int) {}, 1000000); }),
              HasSubstr("set oversubscribe"));
}

TEST(SpawnTest, RanksFormAProcessGroup) {
  dist::spawn(
      [](int rank) {
        dist::init_process_group();
        require(dist::rank() == rank, "rank");
        require(dist::local_rank() == rank, "local rank");
        require(dist::world_size() == 3, "world size");
        require(std::string(std::getenv("LOCAL_WORLD_SIZE")) == "3", "local world size");
        at::Tensor tensor = at::ones({2}) * (rank + 1);
        dist::all_reduce(tensor);
        require(tensor.equal(at::ones({2}) * 6), "sum");
      },
      3);
}

TEST(SpawnTest, AContextIsWaitedFor) {
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const auto waits = [&](int rank) {
    char byte = 0;
    require(::read(go[0], &byte, 1) == 1, "read");
    if (byte == 'x' && rank == 1) throw UserError("rank 1 gives up");
    if (byte == 'x') ::pause();
  };
  auto context = dist::spawn(waits, 2, {.join = false});
  const std::vector<int> pids = context.pids();
  ASSERT_EQ(pids.size(), 2);
  EXPECT_EQ(::kill(pids[1], 0), 0);
  EXPECT_FALSE(context.join(milliseconds(50)));
  EXPECT_FALSE(context.join(milliseconds(0)));
  EXPECT_THAT(message_of<UserError>([&] { context.join(milliseconds(-1)); }),
              HasSubstr("got -1 ms"));
  ASSERT_EQ(::write(go[1], "oo", 2), 2);
  EXPECT_TRUE(context.join(milliseconds::max()));
  EXPECT_TRUE(context.join());

  auto failing = dist::spawn(waits, 2, {.join = false});
  ASSERT_EQ(::write(go[1], "xx", 2), 2);
  EXPECT_THAT(message_of<SpawnError>([&] { failing.join(); }), HasSubstr("rank 1 gives up"));
  EXPECT_THAT(message_of<SpawnError>([&] { failing.join(); }), HasSubstr("rank 1 gives up"));

  pid_t left = 0;
  {
    const auto dropped = dist::spawn(waits, 1, {.join = false});
    left = dropped.pids().front();
  }
  EXPECT_NE(::kill(left, 0), 0);
  ::close(go[0]);
  ::close(go[1]);
}

TEST(SpawnTest, SeveralNodesAreOneWorld) {
  const auto port = syncbn::base::HeldPort::hold(0);
  ASSERT_TRUE(port);
  const std::string method = "tcp://127.0.0.1:" + std::to_string(port->port());
  const auto node = [&](int index) {
    dist::spawn(
        [&](int rank) {
          dist::init_process_group(
              {.init_method = method, .rank = 2 * index + rank, .world_size = 4});
          require(dist::local_rank() == rank, "local rank");
          at::Tensor tensor = at::ones({2}) * (dist::rank() + 1);
          dist::all_reduce(tensor);
          require(tensor.equal(at::ones({2}) * 10), "sum");
        },
        2);
  };
  dist::spawn(node, 2);  // stands for two hosts
}

TEST(SpawnTest, CanBeCalledAgain) {
  for (int round = 0; round < 2; ++round) {
    dist::spawn([](int) { dist::init_process_group(); }, 2);
  }
}

TEST(SpawnTest, UsableCpusAreShared) {
  const int share = std::max(1, syncbn::base::usable_cpus() / 2);
  ::unsetenv("OMP_NUM_THREADS");
  dist::spawn([share](int) { require(at::get_num_threads() == share, "threads"); }, 2);
  {
    syncbn::test::Affinity affinity;
    affinity.bind_to(*syncbn::base::allowed_cpus().begin());
    dist::spawn([](int) { require(at::get_num_threads() == 1, "threads of one CPU"); }, 1);
  }
  ::setenv("OMP_NUM_THREADS", "7", 1);
  dist::spawn([](int) { require(std::string(std::getenv("OMP_NUM_THREADS")) == "7", "threads"); },
              2);
  ::unsetenv("OMP_NUM_THREADS");
}

TEST(SpawnTest, AnExceptionIsPassedOnWithItsRankAndCode) {
  const SpawnError error = error_of(3, [](int rank) {
    dist::init_process_group();
    if (rank == 1) throw UserError("no data for rank 1");
    dist::barrier();
  });
  EXPECT_EQ(error.rank(), 1);
  EXPECT_EQ(error.exit_code(), syncbn::base::kExitUsage);
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("spawn: rank 1 (process "), HasSubstr("failed: no data for rank 1")));
}

TEST(SpawnTest, PeersOfARankThatFailedSayItsCode) {
  int said[2];
  ASSERT_EQ(::pipe(said), 0);
  error_of(2, [&](int rank) {
    ::signal(SIGTERM, SIG_IGN);
    dist::init_process_group();
    dist::barrier();  // until all are connected
    if (rank == 1) throw UserError("no data for rank 1");
    const std::string message = message_of<UnavailableError>([] { dist::barrier(); });
    require(::write(said[1], message.data(), message.size()) > 0, "write");
  });
  ::close(said[1]);
  std::string text(4096, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(::read(said[0], text.data(), text.size()), 0)));
  ::close(said[0]);
  EXPECT_THAT(text, AllOf(HasSubstr("barrier #2"), HasSubstr("rank 1 ("),
                          HasSubstr("ended with exit code 2")));
}

TEST(SpawnTest, ASignalAndAnExitCodeArePassedOn) {
  const SpawnError killed = error_of(2, [](int rank) {
    dist::init_process_group();
    if (rank == 0) ::raise(SIGKILL);
    dist::barrier();
  });
  EXPECT_EQ(killed.rank(), 0);
  EXPECT_EQ(killed.exit_code(), syncbn::base::kExitSignalBase + SIGKILL);
  EXPECT_THAT(killed.what(), HasSubstr("was ended by signal 9 (Killed)"));
  const SpawnError ended = error_of(2, [](int rank) {
    if (rank == 1) ::_exit(5);
  });
  EXPECT_EQ(ended.exit_code(), 5);
  EXPECT_THAT(ended.what(), HasSubstr("ended with exit code 5"));
}

TEST(SpawnTest, AThrownNumberIsAFailureToo) {
  EXPECT_THAT(error_of(1, [](int) { throw 3; }).what(), HasSubstr("not a std::exception"));
}

TEST(SpawnTest, RanksThatIgnoreSigtermAreKilled) {
  int alive[2];
  ASSERT_EQ(::pipe(alive), 0);
  const SpawnError error = error_of(2,
                                    [&](int rank) {
                                      ::signal(SIGTERM, SIG_IGN);
                                      char byte = 'x';
                                      if (rank == 0) {
                                        require(::write(alive[1], &byte, 1) == 1, "write");
                                        for (;;) ::pause();
                                      }
                                      require(::read(alive[0], &byte, 1) == 1, "read");
                                      throw std::runtime_error("first");
                                    },
                                    {.grace = milliseconds(100)});
  EXPECT_EQ(error.rank(), 1);
}

/// A program in its own process group, whose two ranks wait forever.
class WaitingProgram {
 public:
  void start() {
    int alive[2];
    ASSERT_EQ(::pipe(alive), 0);
    process = ::fork();
    if (process == 0) {
      ::setpgid(0, 0);
      ::close(alive[0]);
      dist::spawn(
          [&](int) {
            (void)!::write(alive[1], "x", 1);
            for (;;) ::pause();
          },
          2);
      ::_exit(0);
    }
    ::close(alive[1]);
    end_ = alive[0];
    char byte = 0;
    for (int child = 0; child < 2; ++child) ASSERT_EQ(::read(end_, &byte, 1), 1);
  }
  ~WaitingProgram() { ::close(end_); }

  /// Waits until no process has the other end open any more.
  bool all_end() const {
    char byte = 0;
    return ::read(end_, &byte, 1) == 0;
  }

  pid_t process = -1;

 private:
  int end_ = -1;
};

TEST(SpawnTest, CtrlCEndsAll) {
  WaitingProgram program;
  ASSERT_NO_FATAL_FAILURE(program.start());
  ::kill(-program.process, SIGINT);  // as a terminal does
  int status = 0;
  ASSERT_EQ(::waitpid(program.process, &status, 0), program.process);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
  EXPECT_TRUE(program.all_end());
}

const dist::SpawnFunction kRegistered("registered", [](int rank) { require(rank == 0, "rank"); });
const dist::SpawnFunction kFirst("first", [](int) {});
const dist::SpawnFunction kSecond("twice", [](int) {});
const dist::SpawnFunction kThird("twice", [](int) {});
const dist::SpawnFunction kEmpty("empty", nullptr);

TEST(SpawnTest, ARegisteredFunctionIsForkedToo) {
  dist::spawn("registered", 1);
  EXPECT_EQ(error_of(2, "registered").rank(), 1);
}

TEST(SpawnTest, FunctionsThatCannotBeFoundAreRefused) {
  const auto refusal = [](const auto& function, dist::StartMethod method) {
    return message_of<UserError>([&] { dist::spawn(function, 2, {.start_method = method}); });
  };
  for (const auto method : {dist::StartMethod::kFork, dist::StartMethod::kExec}) {
    EXPECT_THAT(refusal("registred", method),
                HasSubstr("no SpawnFunction 'registred'; did you mean 'registered'?"));
    EXPECT_THAT(refusal("x", method), HasSubstr("'x'; define one outside all functions"));
    EXPECT_THAT(refusal("twice", method), HasSubstr("several SpawnFunctions are named 'twice'"));
    EXPECT_THAT(refusal("empty", method), HasSubstr("no function to run"));
  }
  const std::function<void(int)> function = [](int) {};
  EXPECT_THAT(refusal(function, dist::StartMethod::kExec),
              HasSubstr("only a SpawnFunction can be found"));
  EXPECT_THAT(refusal("first", dist::StartMethod::kExec),
              HasSubstr("main() has not called run_spawned_rank()"));
}

class SpawnExecTest : public ::testing::TestWithParam<const char*> {
 protected:
  static test::ProgramResult run(const std::string& function) {
    return test::run_program({SYNCBN_SPAWN_PROGRAM, GetParam(), function},
                             {.env = {{"INHERITED", "is"}}, .unset = {"OMP_NUM_THREADS"}});
  }
};

TEST_P(SpawnExecTest, RanksFormAProcessGroup) {
  const test::ProgramResult result = run("sum");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank 0 of 2, local rank 0: sum 3\n"),
                                HasSubstr("rank 1 of 2, local rank 1: sum 3\n")));
}

TEST_P(SpawnExecTest, RanksHaveTheParentsEnvironmentAndTheirShareOfTheCpus) {
  const std::string threads = std::to_string(std::max(1, syncbn::base::usable_cpus() / 2));
  EXPECT_THAT(run("environment").out,
              HasSubstr("rank 1: OMP_NUM_THREADS=" + threads + ", is inherited, not spawned\n"));
}

TEST_P(SpawnExecTest, FailuresArePassedOn) {
  const test::ProgramResult failed = run("fails");
  EXPECT_EQ(failed.exit_code, syncbn::base::kExitUsage);
  EXPECT_THAT(failed.err,
              AllOf(HasSubstr("spawn: rank 1 (process "), HasSubstr("failed: no data for rank 1")));
  const test::ProgramResult killed = run("killed");
  EXPECT_EQ(killed.exit_code, syncbn::base::kExitSignalBase + SIGKILL);
  EXPECT_THAT(killed.err, HasSubstr("was ended by signal 9 (Killed)"));
}

TEST_P(SpawnExecTest, RanksEndWithTheirParent) {
  test::Program program({SYNCBN_SPAWN_PROGRAM, GetParam(), "waits"});
  ASSERT_TRUE(program.wait_until([&] { return test::count(program.out(), "\n") == 2; }));
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // the orphaned ranks become children of this process
  program.send_signal(SIGKILL);
  std::istringstream pids(program.wait().out);
  for (pid_t rank = 0; pids >> rank;) {
    int status = 0;
    ASSERT_EQ(::waitpid(rank, &status, 0), rank);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }
}

INSTANTIATE_TEST_SUITE_P(StartMethods, SpawnExecTest, ::testing::Values("fork", "exec"),
                         [](const auto& info) { return std::string(info.param); });

TEST(DeviceCountTest, IsTheListThatCudaReadsAndLeavesForkPossible) {
  const auto count = [](const std::string& visible) {
    const test::Environment list("CUDA_VISIBLE_DEVICES", visible);
    return dist::device_count();
  };
  EXPECT_EQ(count("0,2"), 2);
  EXPECT_EQ(count(""), 0);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  dist::device_count();
  dist::spawn([](int) {}, 1);  // is not refused
}

TEST(SpawnTest, ContextsOverlapWhereChildrenAreIgnored) {
  ::signal(SIGCHLD, SIG_IGN);
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const auto waits = [&](int) {
    char byte = 0;
    require(::read(go[0], &byte, 1) == 1, "read");
  };
  std::optional first(dist::spawn([](int) {}, 1, {.join = false}));
  dist::SpawnContext second = dist::spawn(waits, 1, {.join = false});
  EXPECT_TRUE(first->join());
  first.reset();
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  EXPECT_TRUE(second.join());
}

TEST(SpawnTest, AnExitStatusThatOtherCodeTookIsNamed) {
  dist::SpawnContext context = dist::spawn([](int) {}, 1, {.join = false});
  ASSERT_EQ(::waitpid(context.pids()[0], nullptr, 0), context.pids()[0]);
  EXPECT_THAT(message_of<SpawnError>([&] { context.join(); }), HasSubstr("took its exit status"));
}

TEST(SpawnTest, IsRefusedWhereAForkWouldNotDo) {
  const auto nothing = [](int) {};
  EXPECT_THAT(message_of<UserError>([&] { dist::spawn(nothing, 0); }), HasSubstr("got 0"));
  std::atomic<bool> stop = false;
  std::thread thread([&] {
    while (!stop) std::this_thread::yield();
  });
  EXPECT_THAT(message_of<UserError>([&] { dist::spawn(nothing, 2); }),
              HasSubstr("has 2 threads already"));
  EXPECT_THAT(message_of<UserError>([&] { dist::spawn("registered", 2); }),
              HasSubstr("has 2 threads already"));
  stop = true;
  thread.join();
  EXPECT_THAT(error_of(1,
                       [&](int) {
                         dist::init_process_group();
                         dist::spawn(nothing, 2);
                       })
                  .what(),
              HasSubstr("in a process group already"));
}

TEST(SpawnTest, WorksWhereEndedChildrenAreIgnored) {
  ::signal(SIGCHLD, SIG_IGN);
  dist::spawn([](int) {}, 2);
  EXPECT_EQ(error_of(2, [](int rank) { require(rank == 0, "rank 1 fails"); }).rank(), 1);
  struct sigaction now {};
  ::sigaction(SIGCHLD, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_IGN) << "as before";
  ::signal(SIGCHLD, SIG_DFL);
}

}  // namespace

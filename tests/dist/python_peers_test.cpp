// Ranks of this library and of Python's torch.distributed in one job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <torch/version.h>

#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

constexpr char kWorker[] = SYNCBN_TEST_BIN_DIR "/dist_group_worker";
constexpr char kScript[] = SYNCBN_SOURCE_DIR "/tests/dist/group_worker.py";

/// Runs our worker or Python's, depending on the rank.
constexpr char kDispatcher[] = R"(#!/bin/sh
case " $CPP_RANKS " in
  *" $RANK "*) exec "$WORKER" "$@" ;;
  *) exec "$PYTHON_EXEC" "$SCRIPT" "$@" ;;
esac
)";

/// Both need the same version of libtorch: the formats in the store and of Gloo are not public.
bool python_has_this_torch() {
  return python_torch_version() == TORCH_VERSION;
}

class PythonPeersTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch"); }

  static std::vector<std::string> by_syncbn_launch() {
    return {SYNCBN_BIN_DIR "/syncbn-launch", "--no_python"};
  }
  static std::vector<std::string> by_torchrun() {
    return {python(), "-m", "torch.distributed.run", "--no-python", "--standalone"};
  }

  /// Two of our ranks and two of Python's, which must all get the same results.
  void expect_one_group(std::vector<std::string> command, const std::string& cpp_ranks,
                        const std::map<std::string, std::string>& environment = {},
                        const std::vector<std::string>& arguments = {}) {
    command.insert(command.end(),
                   {"--nproc-per-node=4", folder_.write("dispatch.sh", kDispatcher, true)});
    command.insert(command.end(), arguments.begin(), arguments.end());
    RunProgramOptions options{.timeout_seconds = 110};
    options.env = {{"CPP_RANKS", cpp_ranks},
                   {"WORKER", kWorker},
                   {"PYTHON_EXEC", python()},
                   {"SCRIPT", kScript},
                   {"OMP_NUM_THREADS", "1"}};
    options.env.insert(environment.begin(), environment.end());
    const ProgramResult result = run_program(command, options);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const std::string seen = "sum 10, sent 30, gathered 0 1 2 3, outer ";
    for (const char* rank : {"rank 0: ", "rank 3: "}) {
      EXPECT_THAT(result.out, HasSubstr(rank + seen + "5\n")) << result.err;
    }
    EXPECT_THAT(result.out, HasSubstr("rank 1: " + seen + "2\n")) << result.err;
    EXPECT_THAT(result.out, HasSubstr("rank 2: " + seen + "3\n")) << result.err;
    const std::string other = cpp_ranks == "0 1" ? "2" : "0";
    for (const std::string& line : {
             "statistics: SyncBatchNorm: rank " + other + " runs Python's torch.distributed",
             std::string("unsorted: new_group: "),
             std::string("through Gloo\n"),
             std::string(cpp_ranks == "0 1" ? "ours: 3" : "ours: 7") + ", statistics true\n",
             std::string("joined: 2 batches\n"),
             std::string("layers: SyncBatchNorm: the ranks are in different layers: rank "),
             std::string("in layer 'bn' (3 channels, Float, exchange 1 of 10 values); "),
             std::string("in layer 'bn' (4 channels, Float, exchange 1 of 12 values); "),
             std::string("again: init_process_group: a group with ranks of Python's"),
         }) {
      EXPECT_EQ(count(result.out, line), 2) << line << result.out;
    }
  }

  TempFolder folder_;
};

TEST_F(PythonPeersTest, OneGroupBySyncbnLaunchWithOursAtRankZero) {
  expect_one_group(by_syncbn_launch(), "0 1");
}

TEST_F(PythonPeersTest, OneGroupBySyncbnLaunchWithPythonAtRankZero) {
  expect_one_group(by_syncbn_launch(), "2 3");
}

TEST_F(PythonPeersTest, OneGroupByTorchrunWithPythonAtRankZero) {
  expect_one_group(by_torchrun(), "2 3");
}

// Rank 0 then holds the store, as under syncbn-launch.
const std::map<std::string, std::string> kNoAgentStore{{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}};

class ExhaustivePythonPeersTest : public PythonPeersTest {};

TEST_F(ExhaustivePythonPeersTest, OneGroupByTorchrunWithOursAtRankZero) {
  expect_one_group(by_torchrun(), "0 1");
}

TEST_F(ExhaustivePythonPeersTest, WithoutTheAgentsStoreAndWithOursAtRankZero) {
  expect_one_group(by_torchrun(), "0 1", kNoAgentStore);
}

TEST_F(ExhaustivePythonPeersTest, WithoutTheAgentsStoreAndWithPythonAtRankZero) {
  expect_one_group(by_torchrun(), "2 3", kNoAgentStore);
}

// init_process_group() without a backend, as many scripts call it.
TEST_F(ExhaustivePythonPeersTest, PythonsOwnChoiceOfBackend) {
  expect_one_group(by_syncbn_launch(), "0 1", {{"WORKER_BACKEND", ""}});
}

TEST_F(PythonPeersTest, InAFile) {
  expect_one_group(by_syncbn_launch(), "0 1", {}, {"file://" + (folder_ / "store").string()});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "store"));
}

}  // namespace
}  // namespace syncbn::test

// Our DDP and Python's train the same cases from the same seeds. Parameters and buffers have the
// same bits after every step.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <string>
#include <vector>

#include <torch/version.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace {

using syncbn::base::read_file;
using syncbn::test::python;
using syncbn::test::python_ddp_program;
using syncbn::test::python_torch_version;
using syncbn::test::run_program;
using syncbn::test::TempFolder;

using Words = std::vector<std::string>;

// Twenty steps, and the state before the first one.
constexpr size_t kStates = 21;

// The cases differ in DDP's options, the networks and the optimizers. The parameters take 15 to 30
// kB, so that a bucket_cap_mb of 0.005 makes several buckets.
const Words kCases{
    "net=mlp optimizer=sgd",
    "net=mlp optimizer=adamw",
    "net=mlp optimizer=sgd fused=1",
    "net=mlp optimizer=adamw fused=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005",
    "net=mlp optimizer=adamw bucket_cap_mb=0.005 gradient_as_bucket_view=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 backwards=3",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 backwards=2 gradient_as_bucket_view=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 find_unused_parameters=1",
    "net=conv optimizer=sgd",
    "net=conv optimizer=adamw bucket_cap_mb=0.001",
    "net=conv optimizer=sgd bucket_cap_mb=0.001 broadcast_buffers=0",
    "net=conv optimizer=sgd backwards=2",
    "net=heads optimizer=sgd bucket_cap_mb=0.002",
    "net=heads optimizer=adamw bucket_cap_mb=0.002 find_unused_parameters=1 loss=first",
    "net=branches optimizer=sgd bucket_cap_mb=0.005 find_unused_parameters=1",
    "net=branches optimizer=adamw find_unused_parameters=1 gradient_as_bucket_view=1",
    "net=branches optimizer=adamw bucket_cap_mb=0.005 find_unused_parameters=1 backwards=2",
    "net=branches route=fixed optimizer=sgd bucket_cap_mb=0.005 find_unused_parameters=1 "
    "skip_all_reduce_unused_params=1",
    "net=branches route=fixed optimizer=sgd bucket_cap_mb=0.005 static_graph=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 static_graph=1",
    "net=conv optimizer=adamw bucket_cap_mb=0.001 static_graph=1 gradient_as_bucket_view=1",
    "net=heads optimizer=sgd bucket_cap_mb=0.002 static_graph=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 hook=allreduce",
    "net=conv optimizer=sgd bucket_cap_mb=0.001 hook=fp16",
    "net=mlp optimizer=adamw bucket_cap_mb=0.005 hook=fp16 gradient_as_bucket_view=1",
    "net=mlp optimizer=sgd bucket_cap_mb=0.005 hook=bf16",
    "net=branches optimizer=sgd find_unused_parameters=1 hook=bf16",
};

// PyTorch's hook needs numpy for the first factors. It blocks in Gloo's threads, of which there are
// two, and hangs with more buckets than threads, so these cases have one bucket.
const Words kPowerSgdCases{
    "net=mlp optimizer=sgd hook=powersgd",
    "net=conv optimizer=adamw hook=powersgd gradient_as_bucket_view=1",
};

/// Results can have the same bits only if Python's libtorch is of the version that this was built
/// with.
bool python_has_this_torch() {
  return python_torch_version() == TORCH_VERSION;
}

const Words kPython = python_ddp_program(SYNCBN_SOURCE_DIR "/tests/dist/ddp_parity.py");
const Words kOurs{SYNCBN_DDP_PARITY_WORKER};

Words launched_by_us(int world_size) {
  return {SYNCBN_BIN_DIR "/syncbn-launch", "--standalone",
          fmt::format("--nproc_per_node={}", world_size)};
}

Words launched_by_torchrun(int world_size) {
  return {python(),       "-m",          "torch.distributed.run",
          "--standalone", "--no-python", fmt::format("--nproc-per-node={}", world_size)};
}

/// Runs the cases. The ranks write their states to `folder`.
void run_cases(Words argv, const Words& program, const Words& cases, const TempFolder& folder) {
  argv.insert(argv.end(), program.begin(), program.end());
  argv.push_back(folder.path());
  argv.insert(argv.end(), cases.begin(), cases.end());
  const auto result =
      run_program(argv, {.env = {{"OMP_NUM_THREADS", "1"}}, .timeout_seconds = 200});
  ASSERT_EQ(result.exit_code, 0) << result.err;
}

/// Compares files that contain the states one after another.
void expect_same_states(const std::string& ours, const std::string& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  ASSERT_GT(ours.size(), 0U);
  const size_t size = ours.size() / kStates;
  ASSERT_EQ(size * kStates, ours.size());
  for (size_t step = 0; step < kStates; ++step) {
    const auto state = [&](const std::string& all) { return all.substr(step * size, size); };
    if (step > 0) {
      ASSERT_NE(state(ours), ours.substr((step - 1) * size, size)) << "nothing was learned";
    }
    ASSERT_TRUE(state(ours) == state(theirs)) << "differ first after step " << step;
  }
}

void expect_same_states_on_ranks(const TempFolder& ours, const TempFolder& theirs,
                                 const Words& cases, int world_size) {
  for (size_t number = 0; number < cases.size(); ++number) {
    for (int rank = 0; rank < world_size; ++rank) {
      SCOPED_TRACE(fmt::format("{} on rank {}", cases[number], rank));
      const auto file = fmt::format("{}.rank{}", number, rank);
      expect_same_states(read_file(ours / file), read_file(theirs / file));
    }
  }
}

void expect_parity(const Words& cases, int world_size) {
  const TempFolder ours;
  const TempFolder theirs;
  run_cases(launched_by_us(world_size), kOurs, cases, ours);
  run_cases(launched_by_us(world_size), kPython, cases, theirs);
  expect_same_states_on_ranks(ours, theirs, cases, world_size);
}

class DdpParityTest : public ::testing::TestWithParam<int> {};

TEST_P(DdpParityTest, TrainsToTheSameBitsAsPython) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_parity(kCases, GetParam());
}

class DdpParityPowerSgdTest : public DdpParityTest {};

TEST_P(DdpParityPowerSgdTest, TrainsToTheSameBitsAsPython) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  SYNCBN_SKIP_UNLESS(run_program({python(), "-c", "import numpy"}).exit_code == 0, "python-numpy");
  expect_parity(kPowerSgdCases, GetParam());
}

// With three ranks, the order of additions depends on a gradient's position in its bucket.
const auto kName = [](const auto& ranks) { return std::to_string(ranks.param); };
INSTANTIATE_TEST_SUITE_P(Ranks, DdpParityTest, ::testing::Values(3), kName);
INSTANTIATE_TEST_SUITE_P(Exhaustive, DdpParityTest, ::testing::Values(2), kName);
INSTANTIATE_TEST_SUITE_P(Ranks, DdpParityPowerSgdTest, ::testing::Values(3), kName);
INSTANTIATE_TEST_SUITE_P(Exhaustive, DdpParityPowerSgdTest, ::testing::Values(2), kName);

struct Mixed {
  const char* name;
  Words (*launched)(int world_size);
  const char* our_ranks;  ///< as a pattern in a shell's `case`
};

constexpr Mixed kOursFirst{"ours first under syncbn-launch", launched_by_us, "0|1"};
constexpr Mixed kPythonsFirst{"Python's first under torchrun", launched_by_torchrun, "2|3"};

/// Two ranks of ours and two of Python's train one network.
void expect_mixed_parity(const std::vector<Mixed>& jobs, const Words& cases) {
  const TempFolder ours;
  run_cases(launched_by_us(4), kOurs, cases, ours);
  for (const Mixed& job : jobs) {
    SCOPED_TRACE(job.name);
    const std::string either =
        fmt::format(R"(case $RANK in {}) exec {} "$@";; *) exec {} "$@";; esac)", job.our_ranks,
                    fmt::join(kOurs, " "), fmt::join(kPython, " "));
    const TempFolder mixed;
    run_cases(job.launched(4), {"sh", "-c", either, "sh"}, cases, mixed);
    const std::string plain = read_file(mixed / "0.rank0");
    for (const char* file : {"0.rank1", "0.rank2", "0.rank3"}) {
      expect_same_states(read_file(mixed / file), plain);  // no buffers: all ranks have the same
    }
    expect_same_states_on_ranks(mixed, ours, cases, 4);
  }
}

TEST(DdpMixedJobTest, RanksOfOursAndOfPythonsTrainOneNetwork) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_mixed_parity({kOursFirst, kPythonsFirst},
                      {"net=mlp optimizer=sgd",
                       "net=mlp optimizer=adamw bucket_cap_mb=0.005 gradient_as_bucket_view=1",
                       "net=conv optimizer=adamw bucket_cap_mb=0.001",
                       "net=branches optimizer=adamw bucket_cap_mb=0.005 find_unused_parameters=1 "
                       "backwards=2"});
}

TEST(ExhaustiveDdpMixedJobTest, RanksOfOursAndOfPythonsTrainOneNetwork) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_mixed_parity({kOursFirst,
                       {"Python's first under syncbn-launch", launched_by_us, "1|3"},
                       {"ours first under torchrun", launched_by_torchrun, "0|2"},
                       kPythonsFirst},
                      kCases);
}

}  // namespace

// What docs/buffers.md says about buffers, in numbers, and that the example prints it.
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>

#include <cstdlib>
#include <optional>
#include <sstream>

#include "buffer_broadcast/experiment.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "support/python.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
using buffer_broadcast::BatchNorm;
using buffer_broadcast::Moments;
using syncbn::base::read_file;
using syncbn::test::close;
using syncbn::test::ProgramResult;
using syncbn::test::python_ddp_program;
using syncbn::test::python_has_torch;
using syncbn::test::python_torch_version;
using syncbn::test::run_group;
using syncbn::test::run_program;
using ::testing::HasSubstr;

const std::string kExample = SYNCBN_SOURCE_DIR "/examples/buffer_broadcast/";

/// Whether a tensor has the same bits on both ranks.
bool equal_on_ranks(const at::Tensor& tensor) {
  const std::vector<at::Tensor> all = dist::all_gather(tensor);
  return all[0].equal(all[1]);
}

at::Tensor on_rank(const at::Tensor& tensor, size_t rank) {
  return dist::all_gather(tensor)[rank];
}

TEST(BufferBroadcastTest, RankZerosBuffersStandOnAllRanksOnlyInsideForward) {
  run_group(2, [](int) {
    const Moments seen = buffer_broadcast::run(BatchNorm::kLocal, true);
    EXPECT_TRUE(equal_on_ranks(seen.inside_first));
    EXPECT_FALSE(equal_on_ranks(seen.after_first));
    EXPECT_TRUE(close(seen.after_first, seen.batch_mean * 0.1)) << "of the rank's own batch";
    EXPECT_TRUE(seen.after_backward.equal(seen.after_first));
    EXPECT_TRUE(equal_on_ranks(seen.inside_second));
    EXPECT_TRUE(seen.inside_second.equal(on_rank(seen.after_backward, 0)));
    EXPECT_FALSE(equal_on_ranks(seen.after_second));
  });
}

TEST(BufferBroadcastTest, WithoutItTheRanksNeverAgreeAgain) {
  run_group(2, [](int) {
    const Moments seen = buffer_broadcast::run(BatchNorm::kLocal, false);
    EXPECT_FALSE(equal_on_ranks(seen.after_first));
    EXPECT_TRUE(seen.after_backward.equal(seen.after_first));
    EXPECT_TRUE(seen.inside_second.equal(seen.after_first));
    EXPECT_FALSE(equal_on_ranks(seen.inside_second));
    EXPECT_FALSE(equal_on_ranks(seen.after_second));
  });
}

TEST(BufferBroadcastTest, SyncBatchNormIsEqualOnAllRanksAtEveryMoment) {
  run_group(2, [](int) {
    const Moments seen = buffer_broadcast::run(BatchNorm::kSynchronised, true);
    EXPECT_FALSE(equal_on_ranks(seen.batch_mean));
    EXPECT_TRUE(equal_on_ranks(seen.inside_first));
    EXPECT_TRUE(equal_on_ranks(seen.after_first));
    EXPECT_TRUE(seen.after_backward.equal(seen.after_first));
    EXPECT_TRUE(seen.inside_second.equal(seen.after_first));
    EXPECT_TRUE(equal_on_ranks(seen.after_second));
    const at::Tensor mean_over_ranks =
        (on_rank(seen.batch_mean, 0) + on_rank(seen.batch_mean, 1)) / 2;
    EXPECT_TRUE(close(seen.after_first, mean_over_ranks * 0.1));
  });
}

TEST(BufferBroadcastTest, AnUnusedForwardBeforeTheBackwardWorks) {
  run_group(2, [](int) {
    const at::Tensor expected = buffer_broadcast::gradient(/*unused_forward=*/false);
    EXPECT_TRUE(buffer_broadcast::gradient(/*unused_forward=*/true).equal(expected));
  });
}

ProgramResult run_on_two_ranks(const std::vector<std::string>& program) {
  std::vector<std::string> argv{SYNCBN_BIN_DIR "/syncbn-launch", "--standalone",
                                "--nproc_per_node=2", "--prefix=off"};
  argv.insert(argv.end(), program.begin(), program.end());
  return run_program(argv, {.env = {{"OMP_NUM_THREADS", "1"}}, .timeout_seconds = 110});
}

std::optional<double> number(const std::string& word) {
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  return *end == '\0' ? std::optional(value) : std::nullopt;
}

/// Expects the same words, and nearly the same numbers. The bias of a convolution before batch
/// normalisation has only rounding errors for a gradient; Adam turns them into steps of up to 1e-3,
/// which move running_mean by a tenth of that.
void expect_same_report(const std::string& actual, const std::string& expected) {
  std::istringstream a(actual);
  std::istringstream b(expected);
  std::string left;
  std::string right;
  while (b >> right) {
    ASSERT_TRUE(a >> left) << "ends before " << right << ":\n" << actual;
    const auto value = number(left);
    if (value && number(right)) {
      ASSERT_NEAR(*value, *number(right), 5e-4) << actual;
    } else {
      ASSERT_EQ(left, right) << actual;
    }
  }
  EXPECT_FALSE(a >> left) << "goes on with " << left;
}

/// The indented block of a page that begins with the line `first`, up to the next text.
std::string block_of(const std::string& page, const std::string& first) {
  std::istringstream lines(page);
  std::string block;
  for (std::string line; std::getline(lines, line);) {
    const bool inside = !block.empty();
    if (!inside && line != "    " + first) continue;
    if (!line.starts_with("    ")) break;
    block += line.substr(4) + "\n";
  }
  return block;
}

TEST(BufferBroadcastProgramTest, PrintsWhatTheDocumentationShows) {
  const ProgramResult result = run_on_two_ranks({SYNCBN_BUFFER_BROADCAST});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  expect_same_report(result.out, block_of(read_file(SYNCBN_SOURCE_DIR "/docs/buffers.md"),
                                          "broadcast_buffers = true"));
}

TEST(BufferBroadcastProgramTest, PythonPrintsTheSameWithAndWithoutBroadcast) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const ProgramResult theirs =
      run_on_two_ranks(python_ddp_program(kExample + "buffer_broadcast.py"));
  ASSERT_EQ(theirs.exit_code, 0) << theirs.err;
  const ProgramResult ours = run_on_two_ranks({SYNCBN_BUFFER_BROADCAST});
  ASSERT_EQ(ours.exit_code, 0) << ours.err;
  const size_t both_modes = theirs.out.find("an unused forward");
  ASSERT_NE(both_modes, std::string::npos) << theirs.out;
  expect_same_report(theirs.out.substr(0, both_modes), ours.out.substr(0, both_modes));
  const bool refused = python_torch_version().starts_with("2.11.");
  EXPECT_THAT(theirs.out.substr(both_modes), HasSubstr(refused ? "inplace operation" : "works"));
}

}  // namespace

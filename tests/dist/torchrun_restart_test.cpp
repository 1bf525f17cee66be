// torchrun restarts the ranks of a job: its agent then keeps one store over all attempts.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/multiproc.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

/// A way to start torchrun: how many nodes, and the options of one.
struct Form {
  int nodes;
  Words (*options)(int node, int port);
};

const Form kStandalone{1, [](int, int) -> Words { return {"--standalone", "--nproc-per-node=2"}; }};
const Form kStatic{1, [](int, int port) -> Words {
                     return {"--nproc-per-node=2", "--rdzv-backend=static",
                             "--master-addr=127.0.0.1", fmt::format("--master-port={}", port)};
                   }};
const Form kStaticNodes{2, [](int node, int port) -> Words {
                          return {"--nnodes=2",
                                  "--nproc-per-node=1",
                                  "--rdzv-backend=static",
                                  fmt::format("--node-rank={}", node),
                                  "--master-addr=127.0.0.1",
                                  fmt::format("--master-port={}", port)};
                        }};
const Form kC10dNodes{2, [](int, int port) -> Words {
                        return {"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
                                fmt::format("--rdzv-endpoint=127.0.0.1:{}", port)};
                      }};

const Words kCpp{"--no-python", SYNCBN_TEST_BIN_DIR "/dist_restart_worker"};
[[maybe_unused]] const Words kPython{SYNCBN_SOURCE_DIR "/tests/dist/restart_worker.py"};

/// Rank `fails` ends twice; the third attempt must succeed.
void expect_success(const Form& form, const Words& worker, int fails) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const int port = free_port();
  RunProgramOptions options{.timeout_seconds = 150};
  options.env = {{"FAILS", std::to_string(fails)}, {"OMP_NUM_THREADS", "1"}};
#ifdef SYNCBN_PYTHON_DIR
  options.env["PYTHONPATH"] = SYNCBN_PYTHON_DIR;
#endif
  std::vector<std::unique_ptr<Program>> nodes;
  for (int node = 0; node < form.nodes; ++node) {
    Words command{python(), "-m", "torch.distributed.run", "--max-restarts=3"};
    for (const Words& words : {form.options(node, port), worker}) {
      command.insert(command.end(), words.begin(), words.end());
    }
    nodes.push_back(std::make_unique<Program>(command, options));
  }
  std::string out;
  for (const auto& node : nodes) {
    const ProgramResult result = node->wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    out += result.out;
  }
  EXPECT_THAT(out, HasSubstr("rank 0: sum 4\n"));
  EXPECT_THAT(out, HasSubstr("rank 1: sum 4\n"));
}

// The nodes count different numbers of restarts.
TEST(TorchrunRestartTest, OfTwoNodesThatMeetByC10d) {
  expect_success(kC10dNodes, kCpp, 1);
}

#ifdef SYNCBN_PYTHON_DIR
TEST(TorchrunRestartTest, OfOneNodeAndPython) {
  expect_success(kStandalone, kPython, 1);
}

TEST(ExhaustiveTorchrunRestartTest, OfPython) {
  expect_success(kStatic, kPython, 0);
  for (const Form& form : {kStaticNodes, kC10dNodes}) expect_success(form, kPython, 1);
}
#endif

TEST(ExhaustiveTorchrunRestartTest, OfOneNode) {
  for (const Form& form : {kStandalone, kStatic}) {
    for (const int fails : {0, 1}) expect_success(form, kCpp, fails);
  }
}

TEST(ExhaustiveTorchrunRestartTest, OfTwoNodes) {
  for (const int fails : {0, 1}) expect_success(kStaticNodes, kCpp, fails);
  expect_success(kC10dNodes, kCpp, 0);
}

}  // namespace
}  // namespace syncbn::test

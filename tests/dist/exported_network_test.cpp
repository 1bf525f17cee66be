// A network exported from Python, as torchvision's are, trained under DistributedDataParallel with
// converted layers; and the example that does it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdio>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "dist/convert_cases.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace {

namespace dist = syncbn::dist;
using syncbn::test::close;
using syncbn::test::exchanges;
using syncbn::test::expect_steps;
using syncbn::test::ProgramResult;
using syncbn::test::python;
using syncbn::test::python_has_torch;
using syncbn::test::run_group;
using syncbn::test::run_program;
using syncbn::test::TempFolder;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kLayers = 10;
constexpr int kSteps = 20;

std::string exported(const TempFolder& folder) {
  std::string file = folder.path() / "net.pt";
  const ProgramResult result =
      run_program({python(), SYNCBN_SOURCE_DIR "/examples/torchscript/export.py", file});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return file;
}

std::vector<at::Tensor> tensors_of(const torch::jit::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter);
  for (const at::Tensor& buffer : module.buffers()) all.push_back(buffer);
  return all;
}

void sgd_step(const torch::jit::Module& module) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) {
    parameter.sub_(parameter.grad(), 0.02);
    parameter.mutable_grad() = at::Tensor();
  }
}

constexpr char kNetworkWithHooks[] = R"(
import sys
from typing import Tuple
import torch

def double_input(self, x: Tuple[torch.Tensor]) -> Tuple[torch.Tensor]:
    return (x[0] * 2,)

def add_mean(self, x: Tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return y + x[0].mean()

layers = torch.nn.Sequential(*[torch.nn.BatchNorm2d(3) for _ in range(5)])
layers[2].register_forward_hook(add_mean)
layers.register_forward_pre_hook(double_input)
layers.register_forward_hook(add_mean)
layers.register_forward_hook(add_mean)
torch.jit.script(layers).save(sys.argv[1])
)";

// Hooks of the module that is called and of the layers in it. Module::clone() does not copy hooks.
TEST(ExportedNetworkTest, HooksStay) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const TempFolder folder;
  const std::string file = folder.path() / "hooks.pt";
  folder.write("hooks.py", kNetworkWithHooks);  // TorchScript's compiler reads the source file
  const ProgramResult made = run_program({python(), folder.path() / "hooks.py", file});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  run_group(2, [&](int) {
    torch::jit::Module reference = torch::jit::load(file);
    torch::jit::Module net = torch::jit::load(file);
    EXPECT_EQ(dist::convert_sync_batchnorm(net).converted.size(), 5u);
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    exchanges();  // makes the group
    at::manual_seed(4);
    for (int step = 0; step < 5; ++step) {
      // All ranks have the same batch, so the statistics are those of one rank's batch.
      const at::Tensor batch = at::randn({4, 3, 5, 5}) + step;
      const uint64_t before = exchanges();
      const at::Tensor output = ddp(batch).toTensor();
      EXPECT_EQ(exchanges() - before, 5u) << "forward of step " << step;
      const at::Tensor expected = reference({batch}).toTensor();
      EXPECT_FALSE(close(expected, reference.forward({batch}).toTensor(), 1e-2, 1e-2));
      EXPECT_TRUE(close(output, expected, 1e-4, 1e-5)) << "step " << step;
      output.pow(2).sum().backward();
    }
    const at::Tensor batch = at::randn({4, 3, 5, 5});
    const auto third = [](const torch::jit::Module& module) { return module.attr("2").toModule(); };
    const auto run = [&batch](torch::jit::Module module) { return module({batch}).toTensor(); };
    EXPECT_TRUE(close(run(third(net)), run(third(reference)), 1e-4, 1e-5));
    dist::revert_sync_batchnorm(net);
    EXPECT_TRUE(close(run(net), run(reference), 1e-4, 1e-5));
  });
}

TEST(ExportedNetworkTest, TrainsTwentyStepsAsOnTheWholeBatch) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const TempFolder folder;
  const std::string file = exported(folder);
  run_group(2, [&](int rank) {
    // In float64, so that 20 steps do not amplify rounding.
    const auto load = [&] {
      torch::jit::Module net = torch::jit::load(file);
      net.train();
      net.to(at::kDouble);
      return net;
    };
    torch::jit::Module reference = load();
    torch::jit::Module net = load();
    const auto report = dist::convert_sync_batchnorm(net);
    EXPECT_EQ(report.converted.size(), kLayers);
    EXPECT_THAT(report.converted, Contains("layer2.0.downsample.1"));
    EXPECT_TRUE(report.not_converted.empty());
    dist::DistributedDataParallel<torch::jit::Module> ddp(net);
    exchanges();  // makes the group
    at::manual_seed(3);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor images = at::randn({6, 3, 8, 8}, at::kDouble);
      const at::Tensor labels = at::randint(4, {6}, at::kLong);
      // Ranks have 2 and 4 samples; the weights turn DDP's mean over ranks into a mean over
      // samples.
      const int64_t share = rank == 0 ? 2 : 4;
      const auto own = [&](const at::Tensor& all) { return all.narrow(0, 2L * rank, share); };
      uint64_t before = exchanges();
      const at::Tensor scores = ddp(own(images)).toTensor();
      EXPECT_EQ(exchanges() - before, kLayers) << "forward of step " << step;
      before = exchanges();
      (at::cross_entropy_loss(scores, own(labels)) * (static_cast<double>(share) / 3)).backward();
      EXPECT_EQ(exchanges() - before, kLayers) << "backward of step " << step;
      at::cross_entropy_loss(reference.forward({images}).toTensor(), labels).backward();
      sgd_step(net);
      sgd_step(reference);
    }
    const auto actual = tensors_of(net);
    const auto expected = tensors_of(reference);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(close(actual[i], expected[i], 1e-7, 1e-9)) << "tensor " << i;
    }
  });
}

// The scripted code contains libtorch's check, which sees one rank's values only.
TEST(ExportedNetworkTest, ARankMayHaveOneValueAChannelOnceItIsConverted) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const TempFolder folder;
  const std::string file = exported(folder);
  run_group(2, [&](int) {
    torch::jit::Module net = torch::jit::load(file);
    net.train();
    dist::convert_sync_batchnorm(net);
    // The layers see 1 x 1 pixels.
    const auto forward = [&](const at::Tensor& x) { return net.forward({x}).toTensor(); };
    expect_steps(forward, tensors_of(net), {.exchanges = kLayers, .batch = {1, 3, 1, 1}});
    dist::revert_sync_batchnorm(net);
    EXPECT_ANY_THROW(net.forward({at::randn({1, 3, 1, 1})}));
  });
}

TEST(ExportedNetworkTest, TheExampleTrainsAndPythonLoadsTheResult) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const TempFolder folder;
  const std::string file = exported(folder);
  const std::string launcher = SYNCBN_BIN_DIR "/syncbn-launch";
  const ProgramResult result = run_program({launcher, "--standalone", "--nproc_per_node=2",
                                            "--prefix=off", SYNCBN_TRAIN_TORCHSCRIPT, file},
                                           {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("10 layers converted"));
  double first = 0;
  double last = 0;
  const size_t at = result.out.find("step 10");
  ASSERT_NE(at, std::string::npos) << result.out;
  ASSERT_EQ(
      std::sscanf(result.out.c_str() + at, "step 10 loss %lf step 20 loss %lf", &first, &last), 2)
      << result.out;
  EXPECT_LT(last, first);
  const ProgramResult loaded =
      run_program({python(), "-c",
                   "import sys, torch; net = torch.jit.load(sys.argv[1]).train(); "
                   "print(net.bn1.num_batches_tracked.item(), net(torch.ones(2, 3, 8, 8)).shape)",
                   file});
  EXPECT_EQ(loaded.out, "20 torch.Size([2, 4])\n") << loaded.err;
}

TEST(ExportedNetworkTest, TheExampleSaysWhatItCannotLoad) {
  const ProgramResult result =
      run_program({SYNCBN_TRAIN_TORCHSCRIPT, "/missing/net.pt"}, {.unset = {"WORLD_SIZE"}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("cannot load '/missing/net.pt'"),
                                HasSubstr("No such file or directory"), Not(HasSubstr("frame #"))));
}

}  // namespace

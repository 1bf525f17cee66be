// `train` on GPUs, as a user starts it: ctest -L gpu, or on fake CUDA devices ctest -L fakegpu.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>

#include <memory>
#include <string>
#include <vector>

#include "e2e/train_program.h"
#include "support/skip.h"
#include "support/two_hosts.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

const Env kOnCpus = {{"CUDA_VISIBLE_DEVICES", ""}};

/// Trains a narrow digits network with batches of 64 over `workers` workers.
nlohmann::json train_digits(int workers, const std::string& run_dir, const Words& more,
                            const Env& env = {}) {
  const Words args =
      digits(run_dir, {"--model.width=8", fmt::format("--batch_size={}", 64 / workers)});
  const ProgramResult result = start_launched_train(workers, args + more, env)->wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const bool on_cpus = env.contains("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(result.err.find("GPU") == std::string::npos, on_cpus) << result.err;
  return result.exit_code == 0 ? result_of(run_dir) : nlohmann::json();
}

class GpuTrainingTest : public ::testing::TestWithParam<int> {};

TEST_P(GpuTrainingTest, LearnsTheDigitsOverNcclAsOnCpus) {
  const int gpus = GetParam();
  const std::string need = gpus == 1 ? "gpu" : gpus == 2 ? "two-gpus" : "eight-gpus";
  SYNCBN_SKIP_UNLESS(base::count_gpus() >= gpus, need);
  const TempFolder folder;
  // Few epochs: on the fake CUDA devices a step takes ten times as long as on the CPU.
  const Words epochs = {"--epochs", "4"};
  const auto on_gpus = train_digits(gpus, folder / "gpus", epochs);
  const auto on_cpus = train_digits(gpus, folder / "cpus", epochs, kOnCpus);
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(on_gpus["world_size"], gpus);
  const double expected = on_cpus["test_accuracy"];
  EXPECT_GE(expected, 0.96);
  // bf16 against float32, and CPUs differ in how they round to bf16: 7 of 355 test samples may have
  // other predictions.
  EXPECT_NEAR(on_gpus["test_accuracy"], expected, 0.02);
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuTrainingTest, ::testing::Values(1, 2));
INSTANTIATE_TEST_SUITE_P(Exhaustive, GpuTrainingTest, ::testing::Values(8));

// Two network namespaces, which are two machines for `train` and for NCCL: each rank uses the first
// GPU of its host.
TEST(GpuTwoHostsTest, TrainOverNcclAsTwoGpusOfOneHost) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() > 0, "gpu");
  SYNCBN_SKIP_UNLESS(base::env("FAKE_CUDA_DEVICES").has_value(), "fake-cuda");
  const TwoHosts hosts;
  SYNCBN_SKIP_UNLESS(hosts.available(), "netns");
  const TempFolder folder;
  const std::string boot = folder.write("boot_id", "another machine\n");
  const auto steps = [&](const std::string& run_dir) {
    return digits(folder / run_dir, {"--max_steps=12", "--model.width=8"});
  };
  const auto start_node = [&](int node) {
    const Words words =
        Words{program("syncbn-launch"), "--nnodes=2",          fmt::format("--node_rank={}", node),
              "--nproc_per_node=1",     "--master_addr=node0", "train",
              "--backend=nccl"} +
        steps("hosts");
    const RunProgramOptions options{.env = {{"OMP_NUM_THREADS", "1"},
                                            {"FAKE_CUDA_DEVICES", "1"},
                                            {"NCCL_HOSTID", fmt::format("host{}", node)}}};
    return std::make_unique<Program>(
        hosts.on(node, node == 0 ? words : TwoHosts::with_boot_id(boot, words)), options);
  };
  const auto first = start_node(0);
  const auto second = start_node(1);
  const ProgramResult zero = first->wait();
  ASSERT_EQ(zero.exit_code, 0) << zero.err;
  ASSERT_EQ(second->wait().exit_code, 0);

  const ProgramResult together = start_launched_train(2, steps("together"))->wait();
  ASSERT_EQ(together.exit_code, 0) << together.err;
  EXPECT_EQ(result_of(folder / "hosts")["world_size"], 2);
  EXPECT_EQ(result_of(folder / "hosts")["train_loss"],
            result_of(folder / "together")["train_loss"]);
}

/// Runs one rank of `train` on the digits in float32, in the folder `run_dir`.
void train_steps(int steps, const std::string& run_dir, const Words& more, const Env& env) {
  const Words args =
      digits(run_dir, {"--model.width=8", "--amp=none", fmt::format("--max_steps={}", steps)});
  const ProgramResult result = run_train(args + more, env);
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

/// Devices round differently, and a few steps amplify that.
void expect_close(const at::Tensor& a, const at::Tensor& b, const std::string& name) {
  EXPECT_TRUE(at::allclose(a, b, /*rtol=*/1e-3, /*atol=*/1e-4))
      << name << " differs by " << (a - b).abs().max().item<double>();
}

// Training the digits on eight takes a minute; that is an exhaustive test.
TEST(GpuEightTest, StepsAreThoseOfEightCpus) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() >= 8, "eight-gpus");
  const TempFolder folder;
  const Words steps = {"--max_steps", "3", "--amp", "none"};
  EXPECT_EQ(train_digits(8, folder / "gpus", steps)["world_size"], 8);
  train_digits(8, folder / "cpus", steps, kOnCpus);
  ASSERT_FALSE(HasFailure());
  const auto found = checkpoint_of(folder / "gpus/last.pt");
  const auto expected = checkpoint_of(folder / "cpus/last.pt");
  for (const auto& [name, tensor] : expected.model) {
    expect_close(found.model.at(name), tensor, name);
  }
}

// The final weights, statistics and momentum equal those of a run that stays on the CPU.
TEST(GpuResumeTest, ARunMovesBetweenGpusAndCpus) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() >= 1, "gpu");
  const TempFolder folder;
  train_steps(12, folder / "stays", {}, kOnCpus);
  const auto expected = checkpoint_of(folder / "stays/last.pt");
  for (const bool to_gpu : {true, false}) {
    SCOPED_TRACE(to_gpu ? "from CPU to GPU" : "from GPU to CPU");
    const std::string from = folder / (to_gpu ? "cpu" : "gpu");
    train_steps(6, from, {}, to_gpu ? kOnCpus : Env());
    train_steps(12, from + "-moved", {"--resume", from + "/last.pt"}, to_gpu ? Env() : kOnCpus);
    ASSERT_FALSE(HasFailure());
    const auto moved = checkpoint_of(from + "-moved/last.pt");
    EXPECT_EQ(moved.step, 12);
    for (const auto& [name, tensor] : expected.model) {
      expect_close(moved.model.at(name), tensor, name);
    }
    for (const auto& [name, tensors] : expected.optimizer) {
      for (const auto& [key, tensor] : tensors) {
        expect_close(moved.optimizer.at(name).at(key), tensor, name + " " + key);
      }
    }
  }
}

// For a part of a GPU (MIG), the driver does not report the utilization.
TEST(GpuLogTest, LeavesOutAUtilizationThatTheDriverDoesNotTell) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() >= 1, "gpu");
  SYNCBN_SKIP_UNLESS(base::env("FAKE_CUDA_DEVICES").has_value(), "fake-cuda");
  const TempFolder folder;
  const auto line = [&](const Env& env) {
    train_steps(2, folder / "run", {"--overwrite"}, env);
    const std::string log = base::read_file(folder / "run/log.jsonl");
    const size_t begin = log.rfind('\n', log.find("gpu_memory_bytes"));
    return nlohmann::json::parse(log.substr(begin + 1, log.find('\n', begin + 1) - begin - 1));
  };
  const auto told = line({});
  EXPECT_EQ(told["gpu_utilization"], 0.5);  // the value of the fake NVML
  EXPECT_GT(told["gpu_memory_bytes"], 0);
  EXPECT_FALSE(line({{"FAKE_NVML_NO_UTILIZATION", "1"}}).contains("gpu_utilization"));
}

}  // namespace
}  // namespace syncbn::test

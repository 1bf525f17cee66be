// Binding and GPU counts as the workers see them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>

#include "launch/launcher.h"
#include "machine/topology.h"
#include "support/skip.h"
#include "support/text.h"
#include "workers/keeper.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kPrintCpus = "sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status";

TEST(BindingTest, GivesWorkersCoresOfTheirOwn) {
  SYNCBN_SKIP_UNLESS(launch::allowed_cpus().size() >= 2, "two-cores");
  TempFolder folder;
  const auto result =
      test::launch({"--nproc_per_node=2", "--bind=cores", "sh", "-c", kPrintCpus + " >$RANK"},
                   {.cwd = folder.path()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto first = launch::parse_cpus(base::read_file(folder / "0"));
  const auto second = launch::parse_cpus(base::read_file(folder / "1"));
  launch::Cpus both = first;
  both.insert(second.begin(), second.end());
  EXPECT_EQ(both, launch::allowed_cpus());
  EXPECT_EQ(first.size() + second.size(), both.size()) << "they share some";
}

TEST(BindingTest, IsOffUnlessAskedFor) {
  const auto result = test::launch({"sh", "-c", kPrintCpus});
  EXPECT_EQ(launch::parse_cpus(result.out), launch::allowed_cpus());
}

TEST(BindingTest, KeepsToTheLaunchersOwnCpuSet) {
  SYNCBN_SKIP_UNLESS(launch::allowed_cpus().size() >= 2, "two-cores");
  const std::string last = std::to_string(*launch::allowed_cpus().rbegin());
  for (const char* option : {"--bind=cores", "--numa-binding=node", "--numa-binding=socket",
                             "--numa-binding=exclusive"}) {
    const auto result =
        run_program({"taskset", "-c", last, kLauncher, option, "sh", "-c", kPrintCpus},
                    {.env = {{"CUDA_VISIBLE_DEVICES", ""}}});
    EXPECT_EQ(result.out, last + "\n") << option << result.err;
  }
}

TEST(BindingTest, GivesThreadsByTheShareOfCores) {
  SYNCBN_SKIP_UNLESS(launch::allowed_cpus().size() >= 2, "two-cores");
  const auto cpus = launch::allowed_cpus();
  const std::string two = fmt::format("{},{}", *cpus.begin(), *std::next(cpus.begin()));
  const auto result =
      run_program({"taskset", "-c", two, kLauncher, "--prefix=off", "--nproc_per_node=2",
                   "--bind=cores", "sh", "-c", "echo $OMP_NUM_THREADS"},
                  {.unset = {"OMP_NUM_THREADS"}});
  EXPECT_EQ(result.out, "1\n1\n");
  EXPECT_THAT(result.err, HasSubstr("OMP_NUM_THREADS=1 for each of 2 workers on 2 cores"));
}

// The set of allowed CPUs may shrink between the choice of a CPU and the worker's start.
TEST(KeeperTest, TellsThatAWorkerCannotBeBound) {
  constexpr int kNobodysCpu = 8000;
  const std::vector<launch::WorkerSpec> workers{{.file = "/bin/true",
                                                 .argv = {"true"},
                                                 .env = {},
                                                 .stdout_fd = STDOUT_FILENO,
                                                 .stderr_fd = STDERR_FILENO,
                                                 .cpu_mask = launch::cpu_mask({kNobodysCpu})}};
  launch::Keeper keeper(workers, [] {});
  std::vector<launch::KeeperEvent> events;
  while (events.size() < 4 && !keeper.gone()) {
    pollfd news{keeper.fd(), POLLIN, 0};
    ::poll(&news, 1, -1);
    while (const auto event = keeper.next_event()) events.push_back(*event);
  }
  keeper.finish(std::chrono::seconds(50));
  EXPECT_TRUE(keeper.gone());
  using Kind = launch::KeeperEvent::Kind;
  ASSERT_EQ(events.size(), 4U);
  const auto failed = std::find_if(events.begin(), events.end(), [](const auto& event) {
    return event.kind == Kind::kBindFailed;
  });
  ASSERT_NE(failed, events.end());
  EXPECT_EQ(failed->value, EINVAL);
  EXPECT_EQ(events[2].kind, Kind::kExited);
  EXPECT_EQ(WEXITSTATUS(events[2].value), base::kExitUnavailable);
  EXPECT_EQ(events[3].kind, Kind::kLeft);
  EXPECT_EQ(events[3].value, static_cast<int32_t>(launch::Left::kNothing));
}

TEST(GpuCountTest, AsksNvmlWhereThereIsNoOtherWord) {
  SYNCBN_SKIP_UNLESS(!std::filesystem::exists("/proc/driver/nvidia/gpus"), "no-gpu-driver");
  for (const char* how : {"gpu", "auto"}) {
    const auto result =
        test::launch({std::string("--nproc_per_node=") + how, "sh", "-c", "echo $LOCAL_WORLD_SIZE"},
                     {.env = {{"LD_LIBRARY_PATH", SYNCBN_FAKE_NVML_DIR}, {"FAKE_NVML_GPUS", "3"}},
                      .unset = {"CUDA_VISIBLE_DEVICES"}});
    EXPECT_EQ(count(result.out, "] 3\n"), 3) << result.out << result.err;
  }
}

// Checks libraries that the launcher opens with dlopen(); another test checks those that it links.
TEST(GpuCountTest, LoadsNoLibtorchEither) {
  SYNCBN_SKIP_UNLESS(!std::filesystem::exists("/proc/driver/nvidia/gpus"), "no-gpu-driver");
  const TempFolder folder;
  Program launcher(launch_command({"--nproc_per_node=gpu", "sh", "-c", "echo up; exec sleep 1000"}),
                   {.env = {{"OMP_NUM_THREADS", "1"},
                            {"LD_LIBRARY_PATH", SYNCBN_FAKE_NVML_DIR},
                            {"FAKE_NVML_GPUS", "1"},
                            {"FAKE_NVML_TRACE", folder / "trace"}},
                    .unset = {"CUDA_VISIBLE_DEVICES"}});
  ASSERT_TRUE(launcher.wait_until([&] { return launcher.out() == "up\n"; }));
  ASSERT_TRUE(std::filesystem::exists(folder / "trace"));
  const std::string maps = base::read_file(fmt::format("/proc/{}/maps", launcher.pid()));
  EXPECT_THAT(maps, HasSubstr("libc.so"));
  for (const char* library : {"/libtorch.so", "/libtorch_", "/libc10", "/libcuda", "/libnccl"}) {
    EXPECT_THAT(maps, Not(HasSubstr(library)));
  }
}

TEST(GpuCountTest, DoesNotLoadNvmlForNothing) {
  const TempFolder folder;
  const std::map<std::string, std::string> env{{"LD_LIBRARY_PATH", SYNCBN_FAKE_NVML_DIR},
                                               {"FAKE_NVML_GPUS", "3"},
                                               {"FAKE_NVML_TRACE", folder / "trace"}};
  for (const char* option : {"--nproc_per_node=2", "--nproc_per_node=cpu", "--standalone"}) {
    EXPECT_EQ(
        test::launch({option, "true"}, {.env = env, .unset = {"CUDA_VISIBLE_DEVICES"}}).exit_code,
        0);
  }
  auto listed = env;
  listed["CUDA_VISIBLE_DEVICES"] = "0";
  EXPECT_EQ(test::launch({"--nproc_per_node=gpu", "true"}, {.env = listed}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder / "trace"));
  // Shows that loading the library would leave the trace.
  run_program({"true"}, {.env = {{"LD_PRELOAD", SYNCBN_FAKE_NVML_DIR "/libnvidia-ml.so.1"},
                                 {"FAKE_NVML_TRACE", folder / "trace"}}});
  EXPECT_TRUE(std::filesystem::exists(folder / "trace"));
}

TEST(GpuCountTest, WarnsOfMoreWorkersThanGpus) {
  const auto result =
      test::launch({"--nproc_per_node=4", "true"}, {.env = {{"CUDA_VISIBLE_DEVICES", "0,1"}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(
      result.err,
      "syncbn-launch: warning: 4 workers but 2 GPUs (CUDA_VISIBLE_DEVICES=0,1): local ranks 2 "
      "and up get no GPU (fine for CPU training)\n");
  for (const char* enough : {"0,1,2,3", "0,1,2,3,4", ""}) {
    EXPECT_EQ(
        test::launch({"--nproc_per_node=4", "true"}, {.env = {{"CUDA_VISIBLE_DEVICES", enough}}})
            .err,
        "");
  }
}

TEST(GpuCountTest, RefusesMoreWorkersThanGpusWhereEachShallHaveOne) {
  const auto result = test::launch({"--nproc_per_node=4", "--virtual_local_rank", "true"},
                                   {.env = {{"CUDA_VISIBLE_DEVICES", "0,GPU-7"}}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--virtual_local_rank: 4 workers but 2 GPUs "
                                    "(CUDA_VISIBLE_DEVICES=0,GPU-7); each worker needs one"));
}

}  // namespace
}  // namespace syncbn::test

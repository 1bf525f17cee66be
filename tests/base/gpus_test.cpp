// Counts and finds GPUs. NVML is tests/support/fake_nvml.cpp, which this program finds through its
// RPATH.
#include <gmock/gmock.h>
#include <syncbn/base/gpus.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "support/environment_guard.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::base {
namespace {

using test::Environment;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// /proc of a machine with two GPUs.
class MadeUpProc {
 public:
  MadeUpProc() {
    add("0000:dc:00.0", "GPU-bbbb-2");
    add("0000:18:00.0", "GPU-aaaa-1");
  }
  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  void add(const std::string& address, const std::string& uuid) const {
    const auto gpu = folder_ / ("driver/nvidia/gpus/" + address);
    std::filesystem::create_directories(gpu);
    std::ofstream(gpu / "information")
        << "Model: \t\t NVIDIA H100\nGPU UUID: \t " << uuid << "\nBus Type: \t PCIe\n";
  }

  test::TempFolder folder_;
};

TEST(GpusTest, ReadsTheDriversListInTheOrderOfAddresses) {
  const std::vector<Gpu> gpus = machine_gpus(MadeUpProc().path());
  ASSERT_THAT(gpus, SizeIs(2));
  EXPECT_EQ(gpus[0].address, "0000:18:00.0");
  EXPECT_EQ(gpus[0].uuid, "GPU-aaaa-1");
  EXPECT_EQ(gpus[1].uuid, "GPU-bbbb-2");
}

TEST(GpusTest, AsksNvmlWhereTheDriverHasNoList) {
  const Environment fake("FAKE_NVML_GPUS", "3");
  const test::TempFolder no_driver;
  const std::vector<Gpu> gpus = machine_gpus(no_driver.path());
  ASSERT_THAT(gpus, SizeIs(3));
  EXPECT_EQ(gpus[2].address, "0002:c2:00.0");
  EXPECT_EQ(gpus[2].uuid, "GPU-fake-2");
}

TEST(GpusTest, TheDriversVersionIsFromItsFileOrFromNvml) {
  const test::TempFolder proc;
  std::filesystem::create_directories(proc.path() / "driver/nvidia");
  std::ofstream(proc.path() / "driver/nvidia/version")
      << "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n";
  EXPECT_EQ(nvidia_driver_version(proc.path()), "550.54.15");
  const test::TempFolder no_driver;
  for (const auto& [gpus, version] : {std::pair("3", "535.0.fake"), std::pair("none", "")}) {
    const Environment fake("FAKE_NVML_GPUS", gpus);
    EXPECT_EQ(nvidia_driver_version(no_driver.path()), version);
  }
}

TEST(GpusTest, NvmlSaysHowBusyAGpuIs) {
  const Environment fake("FAKE_NVML_GPUS", "3");
  EXPECT_EQ(gpu_utilization("GPU-fake-2"), 0.52);
  EXPECT_EQ(gpu_utilization("GPU-1234"), std::nullopt);
}

TEST(GpusTest, HasNoGpusWhereNvmlDoesNotStart) {
  const Environment fake("FAKE_NVML_GPUS", "none");
  const test::TempFolder no_driver;
  EXPECT_THAT(machine_gpus(no_driver.path()), IsEmpty());
}

TEST(GpusTest, CountsByNvmlLast) {
  SYNCBN_SKIP_UNLESS(!std::filesystem::exists("/proc/driver/nvidia/gpus"), "no-gpu-driver");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const Environment fake("FAKE_NVML_GPUS", "3");
  EXPECT_EQ(count_gpus(false), 3);
  EXPECT_EQ(count_gpus_at_hand(false), std::nullopt);
}

TEST(GpusTest, CountsTheListThatCudaReads) {
  const auto counted = [](const std::string& visible, bool virtual_local_rank) {
    const Environment list("CUDA_VISIBLE_DEVICES", visible);
    EXPECT_EQ(count_gpus_at_hand(virtual_local_rank), count_gpus(virtual_local_rank));
    return count_gpus(virtual_local_rank);
  };
  EXPECT_EQ(counted("0,1", false), 2);
  EXPECT_EQ(counted("", false), 0);
  EXPECT_EQ(counted("GPU-aaaa, GPU-bbbb,-1,3", false), 2);
  EXPECT_EQ(counted("MIG-1111,MIG-2222", false), 1) << "a process sees one MIG device";
  EXPECT_EQ(counted("MIG-1111,MIG-2222", true), 2);
}

TEST(GpusTest, FollowNumbersAndUuidsOfTheListThatCudaReads) {
  const std::vector<Gpu> machine = machine_gpus(MadeUpProc().path());
  const Gpu* const first = &machine[0];
  const Gpu* const second = &machine[1];
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THAT(visible_gpus(machine), ElementsAre(first, second));
  const auto visible = [&](const std::string& entries) {
    const Environment list("CUDA_VISIBLE_DEVICES", entries);
    return visible_gpus(machine);
  };
  EXPECT_THAT(visible("1,0"), ElementsAre(second, first));
  EXPECT_THAT(visible("GPU-bb,GPU-aaaa-1"), ElementsAre(second, first));
  EXPECT_THAT(visible("MIG-GPU-bbbb-2/1/0"), ElementsAre(second));
  EXPECT_THAT(visible("2,MIG-12ab,GPU-cccc"), ElementsAre(nullptr, nullptr, nullptr));
}

}  // namespace
}  // namespace syncbn::base

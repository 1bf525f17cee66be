// Counting and finding GPUs. NVML is tests/launch/fake_nvml.cpp, which this program finds through
// its RPATH.
#include "machine/devices.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>

#include "launch/environment_guard.h"
#include "launch/made_up_sys.h"
#include "support/skip.h"

namespace syncbn::launch {
namespace {

using test::Environment;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Optional;
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

TEST(DevicesTest, ReadsTheDriversListInTheOrderOfAddresses) {
  const std::vector<Gpu> gpus = machine_gpus(MadeUpProc().path());
  ASSERT_THAT(gpus, SizeIs(2));
  EXPECT_EQ(gpus[0].address, "0000:18:00.0");
  EXPECT_EQ(gpus[0].uuid, "GPU-aaaa-1");
  EXPECT_EQ(gpus[1].uuid, "GPU-bbbb-2");
}

TEST(DevicesTest, AsksNvmlWhereTheDriverHasNoList) {
  const Environment fake("FAKE_NVML_GPUS", "3");
  const test::TempFolder no_driver;
  const std::vector<Gpu> gpus = machine_gpus(no_driver.path());
  ASSERT_THAT(gpus, SizeIs(3));
  EXPECT_EQ(gpus[2].address, "0002:c2:00.0");
  EXPECT_EQ(gpus[2].uuid, "GPU-fake-2");
}

TEST(DevicesTest, HasNoGpusWhereNvmlDoesNotStart) {
  const Environment fake("FAKE_NVML_GPUS", "none");
  const test::TempFolder no_driver;
  EXPECT_THAT(machine_gpus(no_driver.path()), IsEmpty());
}

TEST(DevicesTest, CountsByNvmlLast) {
  SYNCBN_SKIP_UNLESS(!std::filesystem::exists("/proc/driver/nvidia/gpus"), "no-gpu-driver");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const Environment fake("FAKE_NVML_GPUS", "3");
  EXPECT_EQ(count_gpus(false), 3);
  EXPECT_EQ(count_gpus_at_hand(false), std::nullopt);
}

TEST(DevicesTest, CountsTheListThatCudaReads) {
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

class GpuPlacesTest : public ::testing::Test {
 protected:
  GpuPlacesTest() {
    sys_.add_pci_device("0000:18:00.0", 1);
    sys_.add_pci_device("0000:dc:00.0", 5);
  }
  std::vector<std::optional<int>> nodes(const std::string& visible) const {
    const Environment list("CUDA_VISIBLE_DEVICES", visible);
    return all();
  }
  std::vector<std::optional<int>> all() const {
    return nodes_of_visible_gpus(Topology(sys_.path(), {0}), machine_gpus(MadeUpProc().path()));
  }

  test::MadeUpSys sys_;
};

TEST_F(GpuPlacesTest, AreThoseOfAllGpus) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THAT(all(), ElementsAre(1, 5));
}

TEST_F(GpuPlacesTest, FollowNumbersAndUuids) {
  EXPECT_THAT(nodes("1,0"), ElementsAre(5, 1));
  EXPECT_THAT(nodes("GPU-bb,GPU-aaaa-1"), ElementsAre(5, 1));
  EXPECT_THAT(nodes("MIG-GPU-bbbb-2/1/0"), ElementsAre(5));
}

TEST_F(GpuPlacesTest, AreUnknownForWhatThisMachineDoesNotName) {
  EXPECT_THAT(nodes("2,MIG-12ab,GPU-cccc"), ElementsAre(std::nullopt, std::nullopt, std::nullopt));
}

TEST_F(GpuPlacesTest, AreUnknownWhereTheFirmwareDoesNotSay) {
  sys_.add_pci_device("0000:18:00.0", -1);
  EXPECT_THAT(nodes("0,1"), ElementsAre(std::nullopt, Optional(5)));
}

}  // namespace
}  // namespace syncbn::launch

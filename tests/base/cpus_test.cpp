#include <gtest/gtest.h>
#include <syncbn/base/cpus.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "support/temp_folder.h"

namespace syncbn::base {
namespace {

/// A file system with these groups of this process.
class AvailableCpusTest : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    root_.write(file, text);
  }
  int cpus() const { return available_cpus(root_.path()); }

  const int online_ = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  const test::TempFolder root_;
};

TEST_F(AvailableCpusTest, AreThoseOnlineWhereNothingLimitsThem) {
  EXPECT_EQ(cpus(), online_);
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), online_);
  write("sys/fs/cgroup/job/cpu.max", "100000000 100000\n");
  EXPECT_EQ(cpus(), online_);
  EXPECT_LE(available_cpus(), online_);
}

TEST_F(AvailableCpusTest, AreLimitedByAContainersQuota) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(cpus(), 1);
  // Part of a CPU is one.
  write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpus(), 1);
}

TEST_F(AvailableCpusTest, AreLimitedByAGroupFurtherUp) {
  write("proc/self/cgroup", "0::/slice/pod/job\n");
  write("sys/fs/cgroup/slice/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/slice/pod/job/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), 1);
}

TEST_F(AvailableCpusTest, AreLimitedByVersionOneToo) {
  write("proc/self/cgroup", "5:memory:/job\n4:cpuset:/job\n3:cpu,cpuacct:/job\n");
  write("sys/fs/cgroup/cpuset/job/cpu.cfs_quota_us", "1");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus(), online_);
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "120000\n");
  EXPECT_EQ(cpus(), 1);
}

}  // namespace
}  // namespace syncbn::base

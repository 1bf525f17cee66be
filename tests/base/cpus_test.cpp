#include <gtest/gtest.h>
#include <syncbn/base/cpus.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "support/affinity.h"
#include "support/temp_folder.h"

namespace syncbn::base {
namespace {

/// A file system with control groups for this process.
class UsableCpusTest : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    root_.write(file, text);
  }
  int cpus() const { return usable_cpus(kAllowed, root_.path()); }

  static constexpr int kAllowed = 8;
  const test::TempFolder root_;
};

TEST_F(UsableCpusTest, AreThoseAllowedIfNoQuotaLimitsThem) {
  EXPECT_EQ(cpus(), kAllowed);
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), kAllowed);
  write("sys/fs/cgroup/job/cpu.max", "100000000 100000\n");
  EXPECT_EQ(cpus(), kAllowed);
}

TEST_F(UsableCpusTest, AreLimitedByAContainersQuota) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(cpus(), 1);
  // Part of a CPU counts as one.
  write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpus(), 1);
}

TEST_F(UsableCpusTest, AreLimitedByAGroupFurtherUp) {
  write("proc/self/cgroup", "0::/slice/pod/job\n");
  write("sys/fs/cgroup/slice/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/slice/pod/job/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), 1);
}

TEST_F(UsableCpusTest, AreLimitedByVersionOneToo) {
  write("proc/self/cgroup", "5:memory:/job\n4:cpuset:/job\n3:cpu,cpuacct:/job\n");
  write("sys/fs/cgroup/cpuset/job/cpu.cfs_quota_us", "1");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus(), kAllowed);
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "120000\n");
  EXPECT_EQ(cpus(), 1);
}

TEST(AllowedCpusTest, LimitTheUsableOnes) {
  test::Affinity affinity;
  EXPECT_EQ(allowed_cpus(::getpid()), allowed_cpus());
  affinity.bind_to(*allowed_cpus().begin());
  EXPECT_EQ(allowed_cpus().size(), 1U);
  EXPECT_EQ(usable_cpus(), 1);
}

TEST(AllowedCpusTest, RanksDivideTheCpusTheyShareAndKeepThoseTheyAreBoundTo) {
  test::Affinity affinity;
  const int all = usable_cpus();
  EXPECT_EQ(cpus_of_rank(1), all);
  EXPECT_EQ(cpus_of_rank(all), 1);
  EXPECT_EQ(cpus_of_rank(2 * all), 1);
  affinity.bind_to(*allowed_cpus().begin());
  EXPECT_EQ(cpus_of_rank(1), 1);
  EXPECT_EQ(cpus_of_rank(all), 1);
  // A child inherits the mask, so it shares this CPU, however many the machine has.
  const pid_t child = ::fork();
  if (child == 0) ::_exit(cpus_of_rank(2));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace syncbn::base

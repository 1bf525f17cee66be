// Binding of workers on simulated machines.
#include "machine/topology.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <syncbn/base/error.h>

#include "launch/made_up_sys.h"
#include "machine/binding.h"
#include "support/environment_guard.h"

namespace syncbn::launch {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

using GpuNodes = std::vector<std::optional<int>>;

std::vector<std::string> texts(const std::vector<Cpus>& sets) {
  std::vector<std::string> result;
  result.reserve(sets.size());
  for (const Cpus& cpus : sets) result.push_back(format_cpus(cpus));
  return result;
}

TEST(CpusTest, ReadsAndWritesTheKernelsLists) {
  EXPECT_THAT(parse_cpus("0-2,8,10-11\n"), ElementsAre(0, 1, 2, 8, 10, 11));
  EXPECT_THAT(parse_cpus("\n"), IsEmpty());
  EXPECT_THAT(parse_cpus("x,3"), ElementsAre(3));
  EXPECT_EQ(format_cpus({0, 1, 2, 8, 10, 11}), "0-2,8,10-11");
  EXPECT_EQ(format_cpus({}), "");
}

TEST(CpusTest, MakesMasksOfAnyLength) {
  EXPECT_THAT(cpu_mask({0, 2}), ElementsAre(5UL));
  const auto mask = cpu_mask({1500});
  EXPECT_THAT(mask, SizeIs(1500 / 64 + 1));
  EXPECT_EQ(mask.back(), 1UL << (1500 % 64));
  EXPECT_THAT(cpu_mask({}), IsEmpty());
}

TEST(CpusTest, AreThoseThatTheKernelAllows) {
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0) << "more than 1024 processors";
  const Cpus cpus = allowed_cpus();
  EXPECT_THAT(cpus, SizeIs(static_cast<size_t>(CPU_COUNT(&set))));
  for (const int cpu : cpus) EXPECT_TRUE(CPU_ISSET(cpu, &set));
}

/// Two sockets with two NUMA nodes each; a node has two cores with two threads each. CPUs 0 to 7
/// are the cores' first threads, 8 to 15 the second ones. Node 4 has memory only.
class TwoSocketsTest : public ::testing::Test {
 protected:
  TwoSocketsTest() {
    for (int node = 0; node < 4; ++node) {
      const int core = 2 * node;
      sys_.add_node(node, fmt::format("{}-{},{}-{}", core, core + 1, core + 8, core + 9));
    }
    sys_.add_node(4, "");
    for (int cpu = 0; cpu < 16; ++cpu) {
      const int core = cpu % 8;
      const int node = core / 2;
      sys_.add_cpu(cpu, node / 2, fmt::format("{},{}", core, core + 8));
    }
    sys_.write("devices/system/node/possible", "0-4");
  }

  std::vector<std::string> bound(Binding binding, int workers, const GpuNodes& gpus = {},
                                 const std::string& allowed = "0-15") const {
    return texts(bind_workers(Topology(sys_.path(), parse_cpus(allowed)), binding, workers, gpus));
  }

  test::MadeUpSys sys_;
};

TEST_F(TwoSocketsTest, BindsToTheNodeOfTheGpu) {
  EXPECT_THAT(bound(Binding::kNode, 2, {3, 0}), ElementsAre("6-7,14-15", "0-1,8-9"));
  EXPECT_THAT(bound(Binding::kNode, 1, {1, 1}), ElementsAre("2-3,10-11"));
}

TEST_F(TwoSocketsTest, BindsToTheSocketOfTheGpu) {
  EXPECT_THAT(bound(Binding::kSocket, 2, {3, 0}), ElementsAre("4-7,12-15", "0-3,8-11"));
}

TEST_F(TwoSocketsTest, SharesANodeOutAmongTheWorkersOfItsGpus) {
  EXPECT_THAT(bound(Binding::kExclusive, 3, {3, 0, 3}), ElementsAre("6,14", "0-1,8-9", "7,15"));
  EXPECT_THAT(
      [&] {
        bound(Binding::kExclusive, 3, {2, 2, 2});
      },
      ThrowsMessage<base::UserError>(
          HasSubstr("NUMA node 2 has 2 cores (CPU 4-5,12-13) for 3 workers")));
}

TEST_F(TwoSocketsTest, SpreadsWorkersOverTheNodesWithoutGpus) {
  EXPECT_THAT(bound(Binding::kNode, 2), ElementsAre("0-1,8-9", "4-5,12-13"));
  EXPECT_THAT(bound(Binding::kNode, 6), ElementsAre("0-1,8-9", "0-1,8-9", "2-3,10-11", "4-5,12-13",
                                                    "4-5,12-13", "6-7,14-15"));
}

TEST_F(TwoSocketsTest, RefusesWorkersWhoseGpusPlaceIsNotKnown) {
  EXPECT_THAT([&] { bound(Binding::kNode, 2, {3}); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("local rank 1"), HasSubstr("CUDA sees 1 GPU;"))));
  EXPECT_THAT(
      [&] {
        bound(Binding::kNode, 2, {3, std::nullopt});
      },
      ThrowsMessage<base::UserError>(HasSubstr("does not report the node of GPU 1")));
  EXPECT_THAT(bound(Binding::kNode, 2, {std::nullopt}, "0-1"), ElementsAre("0-1", "0-1"))
      << "there is one node";
}

TEST_F(TwoSocketsTest, SharesWholeCoresOutWhileThereAreEnough) {
  EXPECT_THAT(bound(Binding::kCores, 3), ElementsAre("0-2,8-10", "3-5,11-13", "6-7,14-15"));
  EXPECT_THAT(bound(Binding::kCores, 8),
              ElementsAre("0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"));
  EXPECT_THAT([&] { bound(Binding::kCores, 10); },
              ThrowsMessage<base::UserError>(HasSubstr("10 workers need a core each, and this "
                                                       "process may run on 8 (CPU 0-15)")));
}

TEST_F(TwoSocketsTest, NamesHowManyCoresThereAreForTooManyWorkers) {
  EXPECT_THAT(
      [&] { bound(Binding::kCores, 3, {}, "1,9"); },
      ThrowsMessage<base::UserError>(AllOf(HasSubstr("3 workers"), HasSubstr("on 1 (CPU 1,9)"))));
}

TEST_F(TwoSocketsTest, KeepsToItsOwnCpuSet) {
  EXPECT_THAT(bound(Binding::kCores, 2, {}, "1,5,13"), ElementsAre("1", "5,13"));
  EXPECT_THAT(bound(Binding::kNode, 2, {}, "1,5,13"), ElementsAre("1", "5,13"));
  EXPECT_THAT(bound(Binding::kSocket, 1, {1}, "0,2,5"), ElementsAre("0,2"));
  EXPECT_THAT([&] { bound(Binding::kNode, 1, {3}, "1,5"); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("GPU 0 is at NUMA node 3"), HasSubstr("(it has CPU 1,5)"))));
}

TEST(TopologyTest, IsOneNodeOfCoresWhereTheKernelSaysNothing) {
  const test::MadeUpSys nothing;
  const Topology topology(nothing.path(), {0, 3, 4});
  ASSERT_THAT(topology.nodes(), SizeIs(1));
  EXPECT_THAT(topology.nodes()[0].cpus, ElementsAre(0, 3, 4));
  for (const Binding binding : {Binding::kNode, Binding::kSocket}) {
    EXPECT_THAT(texts(bind_workers(topology, binding, 2, {})), ElementsAre("0,3-4", "0,3-4"));
  }
  for (const Binding binding : {Binding::kCores, Binding::kExclusive}) {
    EXPECT_THAT(texts(bind_workers(topology, binding, 2, {})), ElementsAre("0,3", "4"));
  }
}

TEST(TopologyTest, IgnoresWhatIsNoNode) {
  const test::MadeUpSys sys;
  sys.add_node(2, "0-1");
  sys.write("devices/system/node/node/cpulist", "0");
  sys.write("devices/system/node/node1x/cpulist", "0");
  sys.write("devices/system/node/has_cpu", "2");
  const Topology topology(sys.path(), {0, 1});
  ASSERT_THAT(topology.nodes(), SizeIs(1));
  EXPECT_EQ(topology.nodes()[0].id, 2);
}

TEST(TopologyTest, ReadsThisMachine) {
  const Topology topology("/sys", allowed_cpus());
  size_t cpus = 0;
  for (const auto& node : topology.nodes()) {
    cpus += node.cpus.size();
    size_t in_cores = 0;
    for (const Cpus& core : topology.cores(node.cpus)) in_cores += core.size();
    EXPECT_EQ(in_cores, node.cpus.size());
  }
  EXPECT_EQ(cpus, allowed_cpus().size());
}

TEST(ThreadsOfWorkersTest, AreAWorkersShareOfItsProcessors) {
  EXPECT_THAT(threads_of_workers({{0, 1, 2}, {3, 4}}, 6), ElementsAre(3, 2));
  EXPECT_THAT(threads_of_workers({{0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {5}}, 6),
              ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(threads_of_workers({{0}, {0}}, 6), ElementsAre(1, 1));
}

TEST(ThreadsOfWorkersTest, ShareTheQuotaOfAContainer) {
  const std::vector<Cpus> cpus{{0, 1, 2, 3, 4, 5}, {6, 7, 8}};
  EXPECT_THAT(threads_of_workers(cpus, 9), ElementsAre(6, 3));
  EXPECT_THAT(threads_of_workers(cpus, 6), ElementsAre(4, 2));
  EXPECT_THAT(threads_of_workers(cpus, 2), ElementsAre(1, 1));
}

TEST(GpuNodesTest, FollowTheListThatCudaReads) {
  const test::MadeUpSys sys;
  sys.add_pci_device("0000:18:00.0", 1);
  sys.add_pci_device("0000:dc:00.0", 5);
  sys.add_pci_device("0000:ee:00.0", -1);  // the firmware does not report its node
  const std::vector<base::Gpu> machine{
      {"0000:18:00.0", "GPU-a"}, {"0000:dc:00.0", "GPU-b"}, {"0000:ee:00.0", "GPU-c"}};
  const Topology topology(sys.path(), {0});
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(nodes_of_visible_gpus(topology, machine), (GpuNodes{1, 5, std::nullopt}));
  const test::Environment list("CUDA_VISIBLE_DEVICES", "1,0,GPU-x");
  EXPECT_EQ(nodes_of_visible_gpus(topology, machine), (GpuNodes{5, 1, std::nullopt}));
}

}  // namespace
}  // namespace syncbn::launch

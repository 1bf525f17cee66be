// Training on two nodes, in network namespaces.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "e2e/train_program.h"
#include "support/skip.h"
#include "support/two_hosts.h"

namespace syncbn::test {
namespace {

// The master's name resolves to loopback on the master and to its outer address elsewhere: the
// store must not listen on loopback only, and peers need the outer address.
TEST(TwoNodesTest, LearnWhatFourRanksOfOneNodeLearn) {
  const TwoHosts hosts;
  SYNCBN_SKIP_UNLESS(hosts.available(), "netns");
  const TempFolder folder;
  const auto node = [&](int rank) {
    const Words words{
        program("syncbn-launch"), "--nnodes=2",          fmt::format("--node_rank={}", rank),
        "--nproc_per_node=2",     "--master_addr=node0", "train"};
    // The nodes share no folder; only rank 0 writes.
    return hosts.on(rank, words + digits(folder / fmt::format("node{}", rank), {"--epochs=1"}));
  };
  Program first(node(0), {.env = {{"OMP_NUM_THREADS", "1"}}});
  Program second(node(1), {.env = {{"OMP_NUM_THREADS", "1"}}});
  const auto zero = first.wait();
  const auto one = second.wait();
  ASSERT_EQ(zero.exit_code, 0) << zero.err;
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_FALSE(std::filesystem::exists(folder / "node1"));

  const auto alone = launch_train(4, digits(folder / "alone", {"--epochs=1"}));
  ASSERT_EQ(alone.exit_code, 0) << alone.err;
  const auto together = result_of(folder / "node0");
  EXPECT_EQ(together["world_size"], 4);
  EXPECT_EQ(together["train_loss"], result_of(folder / "alone")["train_loss"]);
}

}  // namespace
}  // namespace syncbn::test

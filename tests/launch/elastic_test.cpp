// Nodes that join and leave during a job: launchers on one host with the c10d backend.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <deque>
#include <filesystem>
#include <utility>

#include "launch/launcher.h"
#include "support/multiproc.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class LaunchElasticTest : public ::testing::Test {
 protected:
  /// Starts a node; the first one leads.
  Program& start(const std::string& nnodes, const std::vector<std::string>& options,
                 const std::vector<std::string>& program) {
    const Words words{"--nnodes=" + nnodes, "--rdzv_backend=c10d",
                      fmt::format("--rdzv_endpoint=127.0.0.1:{}", port_),
                      fmt::format("--rdzv_conf={},is_host={}", conf_, programs_.empty() ? 1 : 0)};
    return programs_.emplace_back(
        launch_command(words + options + program),
        RunProgramOptions{.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder_.path()});
  }

  /// Each worker prints its ranks and sizes, leaves a mark with them, and ends once the file "go"
  /// exists.
  static std::vector<std::string> until_go() {
    return {"sh", "-c",
            "echo worker $RANK/$WORLD_SIZE node $GROUP_RANK/$GROUP_WORLD_SIZE restarts "
            "$TORCHELASTIC_RESTART_COUNT; touch up$RANK.$WORLD_SIZE; "
            "while [ ! -e go ]; do sleep 0.01; done"};
  }
  /// Waits until until_go() runs on `size` nodes with one worker each.
  void wait_for_world(Program& program, int size) {
    ASSERT_TRUE(program.wait_until([&] {
      for (int rank = 0; rank < size; ++rank) {
        if (!std::filesystem::exists(folder_ / fmt::format("up{}.{}", rank, size))) return false;
      }
      return true;
    })) << program.err();
  }
  void go() { folder_.write("go", ""); }

  const TempFolder folder_;
  const int port_ = free_port();
  std::string conf_ = "last_call_timeout=0";
  std::deque<Program> programs_;
};

// Kills the middle one of three nodes: the ranks after it must leave no gap.
TEST_F(LaunchElasticTest, GoesOnWithoutANodeThatIsKilled) {
  conf_ = "last_call_timeout=1000";
  Program& lead = start("2:3", {}, until_go());
  Program& one = start("2:3", {"--node_rank=1"}, until_go());
  Program& two = start("2:3", {"--node_rank=2"}, until_go());
  wait_for_world(lead, 3);
  one.send_signal(SIGKILL);
  wait_for_world(lead, 2);
  go();
  const auto first = lead.wait();
  const auto last = two.wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(last.exit_code, 0) << last.err;
  EXPECT_THAT(first.err, HasSubstr("starting again on 2 nodes with 2 workers: node 1 ("));
  EXPECT_THAT(first.err, HasSubstr("is lost"));
  EXPECT_THAT(last.out, AllOf(HasSubstr("[2] worker 2/3 node 2/3 restarts 0\n"),
                              HasSubstr("[1] worker 1/2 node 1/2 restarts 0\n")));
}

TEST_F(LaunchElasticTest, ASignalTakesANodeOut) {
  Program& lead = start("1:2", {}, until_go());
  wait_for_world(lead, 1);
  std::filesystem::remove(folder_ / "up0.1");
  Program& guest = start("1:2", {}, until_go());
  wait_for_world(guest, 2);
  guest.end_by(SIGTERM);
  wait_for_world(lead, 1);
  go();
  const auto result = lead.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("starting again on 1 node with 1 worker: node 1 ("),
                                HasSubstr("leaves")));
}

TEST_F(LaunchElasticTest, ARangeNeedsC10d) {
  const auto result = launch({"--nnodes=1:2", "--node_rank=0", "--master_addr=127.0.0.1", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--nnodes=1:2, a range, needs --rdzv_backend=c10d"));
}

TEST_F(LaunchElasticTest, WhoLeadsMayBeSaid) {
  Program& guest = start("1:2", {"--rdzv_conf=is_host=0,last_call_timeout=1000"}, until_go());
  Program& lead = start("1:2", {"--rdzv_conf=is_host=1,last_call_timeout=1000"}, until_go());
  go();
  EXPECT_EQ(guest.wait().exit_code, 0) << guest.err();
  const auto result = lead.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[0] worker 0/2 node 0/2"));
}

// Unmodified Python workers, in a case of torchrun's own tests: one of two elastic agents is
// killed.
TEST_F(LaunchElasticTest, PythonWorkersGoOnWithTheNodesThatAreLeft) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  folder_.write("work.py", R"(import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
size = dist.get_world_size()
total = torch.ones(1)
dist.all_reduce(total)
print("world", size, "sum", int(total), flush=True)
open(f"up{dist.get_rank()}.{size}", "w").close()
while size == 2:
    dist.all_reduce(total)
    time.sleep(0.01)
dist.destroy_process_group()
)");
  const std::vector<std::string> program{python(), "work.py"};
  conf_ = "last_call_timeout=1000";
  Program& lead = start("1:2", {}, program);
  Program& guest = start("1:2", {}, program);
  wait_for_world(lead, 2);
  guest.send_signal(SIGKILL);
  const auto result = lead.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("world 2 sum 2\n"), HasSubstr("world 1 sum 1\n")));
}

TEST_F(LaunchElasticTest, AllNodesAndAttemptsAreOneJob) {
  const std::vector<std::string> program{
      "sh", "-c",
      "echo $SYNCBN_JOB_ID > job$RANK.$WORLD_SIZE; touch up$RANK.$WORLD_SIZE; "
      "while [ ! -e go ]; do sleep 0.01; done"};
  Program& lead = start("1:2", {"--log_dir=logs", "--redirects=3"}, program);
  wait_for_world(lead, 1);
  Program& guest = start("1:2", {}, program);
  wait_for_world(guest, 2);
  go();
  EXPECT_EQ(lead.wait().exit_code, 0);
  EXPECT_EQ(guest.wait().exit_code, 0);
  EXPECT_THAT(lead.err(), AllOf(HasSubstr("starting again on 2 nodes with 2 workers: node 1 ("),
                                HasSubstr("has joined")));
  const auto id = [&](const std::string& name) {
    std::ifstream file(folder_ / name);
    std::string text;
    file >> text;
    return text;
  };
  EXPECT_NE(id("job0.1"), "");
  EXPECT_EQ(id("job0.2"), id("job0.1"));
  EXPECT_EQ(id("job1.2"), id("job0.1"));
  // Each attempt has its own log folder.
  const auto run = std::filesystem::directory_iterator(folder_ / "logs")->path();
  EXPECT_TRUE(std::filesystem::exists(run / "attempt_0" / "0" / "stdout.log"));
  EXPECT_TRUE(std::filesystem::exists(run / "attempt_1" / "0" / "stdout.log"));
}

}  // namespace
}  // namespace syncbn::test

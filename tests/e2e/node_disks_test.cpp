// checkpoint.on: node. Nodes are processes with their own working folders.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <filesystem>

#include "e2e/quiet_exits.h"
#include "e2e/train_program.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class NodeDisksTest : public ::testing::Test {
 protected:
  NodeDisksTest() {
    for (const char* disk : {"a", "b", "whole"}) fs::create_directory(disk_(disk));
  }

  /// Trains on two nodes, each with one rank and the disk of the given name.
  std::vector<ProgramResult> run(const std::string& first, const std::string& second,
                                 const Words& more = {}) const {
    const Words args = {"--config=" + shipped_config("digits.yaml"),
                        "--epochs=3",
                        "--sync_batchnorm=false",
                        "--ddp.broadcast_buffers=true",
                        "--checkpoint.on=node",
                        "--checkpoint.keep_best.count=2"};
    const int port = free_port();
    std::vector<std::unique_ptr<Program>> ranks;
    for (const std::string& disk : {first, second}) {
      Env env = rank_env(static_cast<int>(ranks.size()), 2, port);
      env["LOCAL_RANK"] = "0";
      env["LOCAL_WORLD_SIZE"] = "1";
      ranks.push_back(start_train(args + more, env, disk_(disk)));
    }
    return wait_for(ranks);
  }

  train::Checkpoint load(const std::string& file) const { return checkpoint_of(disk_(file)); }

  std::vector<std::string> files(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(disk_(folder))) {
      // The name of an event file contains the time at which it was begun.
      const std::string name = entry.path().filename();
      // Written at the first step; a lost disk lacks them.
      if (name == "pictures" || name == "first_batch.csv") continue;
      names.push_back(name.starts_with("events.out.tfevents.") ? "events" : name);
    }
    // A disk that was not lost has the event files of both attempts.
    std::ranges::sort(names);
    names.erase(std::ranges::unique(names).begin(), names.end());
    return names;
  }

  static int64_t epochs_in_log(const std::string& log) {
    return count(base::read_file(log), R"("event":"epoch")");
  }

  std::string disk_(const std::string& name) const { return folder_ / name; }

  TempFolder folder_;
};

void expect_all_succeed(const std::vector<ProgramResult>& results) {
  for (const ProgramResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST_F(NodeDisksTest, ARunSurvivesTheLossOfEachNodesDisk) {
  expect_all_succeed(run("whole", "whole"));
  for (const std::string lost : {"a", "b"}) {
    for (const char* disk : {"a", "b"}) fs::remove_all(disk_(disk) + "/runs");
    const auto stopped = run("a", "b", {"--max_steps=150"});
    expect_all_succeed(stopped);
    EXPECT_THAT(stopped[0].err, HasSubstr("writes to runs/digits on 2 nodes"));
    EXPECT_EQ(stopped[1].err, "");
    EXPECT_EQ(files("a/runs/digits"), files("b/runs/digits"));
    expect_same_run(load("a/runs/digits/last.pt"), load("b/runs/digits/last.pt"));

    fs::remove_all(disk_(lost) + "/runs");
    const auto resumed = run("a", "b", {"--resume=auto"});
    expect_all_succeed(resumed);
    EXPECT_THAT(resumed[0].err, HasSubstr("at epoch 2, step 150"));
    for (const std::string disk : {"a", "b"}) {
      EXPECT_EQ(files(disk + "/runs/digits"), files("a/runs/digits"));
      EXPECT_EQ(epochs_in_log(disk_(disk) + "/runs/digits/log.jsonl"), 3);
      expect_same_run(load(disk + "/runs/digits/last.pt"), load("whole/runs/digits/last.pt"));
      expect_same_run(load(disk + "/runs/digits/best.pt"), load("a/runs/digits/best.pt"));
    }
  }
}

TEST_F(NodeDisksTest, ADamagedCheckpointOfOneNodeIsSetAside) {
  for (const std::string damaged : {"a", "b"}) {
    for (const char* disk : {"a", "b"}) fs::remove_all(disk_(disk) + "/runs");
    expect_all_succeed(run("a", "b", {"--max_steps=50"}));
    base::write_file_atomically(disk_(damaged + "/runs/digits/last.pt"), "cut off");
    const auto resumed = run("a", "b", {"--resume=auto", "--max_steps=60"});
    expect_all_succeed(resumed);
    EXPECT_THAT(resumed[0].err, HasSubstr("at epoch 1, step 50"));
    EXPECT_THAT(resumed[damaged == "a" ? 0 : 1].err,
                HasSubstr(fmt::format("last.pt is damaged: it is now runs/digits/last.pt.damaged, "
                                      "and the run resumes from runs/digits/last.pt of rank {}",
                                      damaged == "a" ? 1 : 0)));
    EXPECT_EQ(base::read_file(disk_(damaged + "/runs/digits/last.pt.damaged")), "cut off");
    expect_same_run(load("a/runs/digits/last.pt"), load("b/runs/digits/last.pt"));
  }
  for (const char* disk : {"a", "b"}) {
    base::write_file_atomically(disk_(disk) + std::string("/runs/digits/last.pt"), "cut off");
  }
  shorten_quiet_exits();
  const auto none = run("a", "b", {"--resume=auto", "--max_steps=70"});
  EXPECT_EQ(none[0].exit_code, base::kExitUsage);
  EXPECT_EQ(count(none[0].err + none[1].err, "error:"), 1) << none[0].err << none[1].err;
  EXPECT_TRUE(fs::exists(disk_("a/runs/digits/last.pt")));
}

TEST_F(NodeDisksTest, NodesThatShareADiskWriteOnce) {
  const auto results = run("a", "a", {"--epochs=1"});
  expect_all_succeed(results);
  EXPECT_THAT(results[0].err, HasSubstr("writes to runs/digits"));
  EXPECT_THAT(results[0].err, Not(HasSubstr("nodes")));
  EXPECT_EQ(epochs_in_log(disk_("a/runs/digits/log.jsonl")), 1);
  EXPECT_EQ(files("a"), std::vector<std::string>{"runs"});
}

TEST_F(NodeDisksTest, ARunOfAnotherJobOnAnyNodeIsLeftAlone) {
  fs::create_directories(disk_("b/runs/digits"));
  base::write_file_atomically(disk_("b/runs/digits/last.pt"), "another run");
  shorten_quiet_exits();
  const auto results = run("a", "b", {"--epochs=1"});
  EXPECT_EQ(results[0].exit_code, base::kExitUsage);
  EXPECT_EQ(results[0].err, "");
  EXPECT_THAT(results[1].err, HasSubstr("run_dir: runs/digits already holds a run"));
  EXPECT_EQ(base::read_file(disk_("b/runs/digits/last.pt")), "another run");
  EXPECT_FALSE(fs::exists(disk_("a/runs")));
}

}  // namespace
}  // namespace syncbn::test

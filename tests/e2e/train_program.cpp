#include "e2e/train_program.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "support/multiproc.h"

namespace syncbn::test {
namespace {

const Words kLauncherVariables = {"RANK",        "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                  "MASTER_ADDR", "MASTER_PORT"};

}  // namespace

std::string program(const std::string& name) {
  return std::string(SYNCBN_BIN_DIR "/") + name;
}

std::string shipped_config(const std::string& name) {
  return std::string(SYNCBN_SOURCE_DIR "/configs/") + name;
}

Words digits(const std::string& run_dir, const Words& more) {
  return Words{"--config", shipped_config("digits.yaml"), "--run_dir", run_dir} + more;
}

nlohmann::json result_of(const std::string& run_dir) {
  return nlohmann::json::parse(base::read_file(run_dir + "/result.json"));
}

train::Checkpoint checkpoint_of(const std::string& file) {
  return train::parse_checkpoint(base::read_file(file), file);
}

void expect_same(const train::Checkpoint::Tensors& a, const train::Checkpoint::Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(at::equal(tensor, b.at(name))) << name;
}

void expect_same_run(const train::Checkpoint& a, const train::Checkpoint& b) {
  EXPECT_EQ(a.step, b.step);
  expect_same(a.model, b.model);
  expect_same(a.ema, b.ema);
  expect_same(a.scaler, b.scaler);
  EXPECT_EQ(a.schedule, b.schedule);
  EXPECT_EQ(a.optimizer.size(), b.optimizer.size());
  for (const auto& [name, tensors] : a.optimizer) expect_same(tensors, b.optimizer.at(name));
}

void expect_mistake(const ProgramResult& result, const std::string& message) {
  const std::string said = result.out + result.err;
  EXPECT_EQ(result.exit_code, base::kExitUsage) << said;
  EXPECT_EQ(count(result.out, ": error: "), 0) << result.out;
  EXPECT_EQ(count(said, ": error: "), 1) << said;
  EXPECT_THAT(said, ::testing::HasSubstr(message));
}

Env rank_env(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

std::unique_ptr<Program> start_train(const Words& args, const Env& env, const std::string& cwd) {
  RunProgramOptions options;
  options.env = env;
  options.env["OMP_NUM_THREADS"] = "1";
  for (const std::string& name : kLauncherVariables) {
    if (!env.contains(name)) options.unset.push_back(name);
  }
  options.cwd = cwd;
  return std::make_unique<Program>(Words{program("train")} + args, options);
}

ProgramResult run_train(const Words& args, const Env& env, const std::string& cwd) {
  return start_train(args, env, cwd)->wait();
}

std::vector<std::unique_ptr<Program>> start_ranks(int world_size, const Words& args) {
  const int port = free_port();
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(start_train(args, rank_env(rank, world_size, port)));
  }
  return ranks;
}

std::vector<ProgramResult> wait_for(std::vector<std::unique_ptr<Program>>& ranks) {
  std::vector<ProgramResult> results;
  for (const auto& rank : ranks) results.push_back(rank->wait());
  return results;
}

void run_ranks_of_train(int world_size, const Words& args) {
  auto ranks = start_ranks(world_size, args);
  for (const ProgramResult& result : wait_for(ranks)) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

std::unique_ptr<Program> start_launched_train(int world_size, const Words& args, const Env& env,
                                              const std::string& cwd) {
  RunProgramOptions options;
  options.env = env;
  options.unset = kLauncherVariables;
  options.cwd = cwd;
  return std::make_unique<Program>(
      Words{program("syncbn-launch"), "--standalone",
            "--nproc_per_node=" + std::to_string(world_size), "train"} +
          args,
      options);
}

ProgramResult launch_train(int world_size, const Words& args, const std::string& cwd) {
  return start_launched_train(world_size, args, {}, cwd)->wait();
}

}  // namespace syncbn::test

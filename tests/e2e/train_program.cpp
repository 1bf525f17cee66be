#include "e2e/train_program.h"

#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include "support/multiproc.h"

namespace syncbn::test {
namespace {

const std::vector<std::string> kLauncherVariables = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};

std::vector<std::string> joined(std::vector<std::string> front,
                                const std::vector<std::string>& back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

}  // namespace

std::string program(const std::string& name) {
  return std::string(SYNCBN_BIN_DIR "/") + name;
}

std::string shipped_config(const std::string& name) {
  return std::string(SYNCBN_SOURCE_DIR "/configs/") + name;
}

nlohmann::json result_of(const std::string& run_dir) {
  return nlohmann::json::parse(base::read_file(run_dir + "/result.json"));
}

Env rank_env(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

std::unique_ptr<Program> start_train(const std::vector<std::string>& args, const Env& env,
                                     const std::string& cwd) {
  RunProgramOptions options;
  options.env = env;
  options.env["OMP_NUM_THREADS"] = "1";
  for (const std::string& name : kLauncherVariables) {
    if (!env.contains(name)) options.unset.push_back(name);
  }
  options.cwd = cwd;
  return std::make_unique<Program>(joined({program("train")}, args), options);
}

ProgramResult run_train(const std::vector<std::string>& args, const Env& env,
                        const std::string& cwd) {
  return start_train(args, env, cwd)->wait();
}

std::vector<std::unique_ptr<Program>> start_ranks(int world_size,
                                                  const std::vector<std::string>& args) {
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

void run_ranks_of_train(int world_size, const std::vector<std::string>& args) {
  auto ranks = start_ranks(world_size, args);
  for (const ProgramResult& result : wait_for(ranks)) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

std::unique_ptr<Program> start_launched_train(int world_size, const std::vector<std::string>& args,
                                              const Env& env, const std::string& cwd) {
  RunProgramOptions options;
  options.env = env;
  options.unset = kLauncherVariables;
  options.cwd = cwd;
  return std::make_unique<Program>(
      joined({program("syncbn-launch"), "--standalone",
              "--nproc_per_node=" + std::to_string(world_size), "train"},
             args),
      options);
}

ProgramResult launch_train(int world_size, const std::vector<std::string>& args,
                           const std::string& cwd) {
  return start_launched_train(world_size, args, {}, cwd)->wait();
}

}  // namespace syncbn::test

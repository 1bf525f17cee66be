#pragma once

#include <syncbn/train/checkpoint.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/temp_folder.h"
#include "support/text.h"

namespace syncbn::test {

using Env = std::map<std::string, std::string>;

/// Path of a program in the build tree.
std::string program(const std::string& name);

/// Path of a configuration that ships with the project.
std::string shipped_config(const std::string& name);

/// The options of a run on the digits.
Words digits(const std::string& run_dir, const Words& more = {});

/// The result.json of a run.
nlohmann::json result_of(const std::string& run_dir);

/// The checkpoint in a file.
train::Checkpoint checkpoint_of(const std::string& file);

/// Expects the same tensors, bit for bit.
void expect_same(const train::Checkpoint::Tensors& a, const train::Checkpoint::Tensors& b);

/// Expects checkpoints of runs that have the same step and state.
void expect_same_run(const train::Checkpoint& a, const train::Checkpoint& b);

/// Expects a refusal in one message, and `message` in it.
void expect_mistake(const ProgramResult& result, const std::string& message);

/// The environment that a launcher sets for a rank.
Env rank_env(int rank, int world_size, int port);

/// Starts `train` in the folder `cwd`, with `env` but no other variables of a launcher.
std::unique_ptr<Program> start_train(const Words& args, const Env& env = {},
                                     const std::string& cwd = "");

ProgramResult run_train(const Words& args, const Env& env = {}, const std::string& cwd = "");

/// Starts ranks 0 .. world_size - 1 of `train`.
std::vector<std::unique_ptr<Program>> start_ranks(int world_size, const Words& args);

std::vector<ProgramResult> wait_for(std::vector<std::unique_ptr<Program>>& ranks);

/// Runs start_ranks() and fails the test unless all ranks succeed.
void run_ranks_of_train(int world_size, const Words& args);

/// Starts `syncbn-launch --standalone --nproc_per_node=N train ...`.
std::unique_ptr<Program> start_launched_train(int world_size, const Words& args,
                                              const Env& env = {}, const std::string& cwd = "");

/// Runs such a job to its end.
ProgramResult launch_train(int world_size, const Words& args, const std::string& cwd = "");

}  // namespace syncbn::test

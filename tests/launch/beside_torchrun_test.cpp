// Runs the same job with torchrun and with syncbn-launch, and compares the workers and the log
// folders. docs/torchrun.md lists the intended differences.
#include <gmock/gmock.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/torchrun_cases.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kNote = R"(import json, os, sys
with open("rank" + os.environ["RANK"], "w") as file:
    json.dump({"argv": sys.argv, "name": __name__, "environment": dict(os.environ)}, file)
)";

class BesideTorchrun : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch"); }

  static Words torchrun(const std::string& module = "run") {
    return {python(), "-m", "torch.distributed." + module};
  }

  /// The environment of each of two workers.
  static std::vector<Json> found(const Words& launcher, const Words& options,
                                 const Environment& env = {}) {
    const TempFolder folder;
    folder.write("note.py", kNote);
    const auto result = run_program(launcher + Words{"--nproc-per-node=2"} + options +
                                        Words{"note.py", "--epochs", "3", "$local_rank"},
                                    options_in(folder, env));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return {Json::parse(text_of(folder / "rank0")), Json::parse(text_of(folder / "rank1"))};
  }

  static void erase_our_own(Json& environment) {
    for (auto variable = environment.begin(); variable != environment.end();) {
      variable = variable.key().starts_with("SYNCBN_") ? environment.erase(variable) : ++variable;
    }
  }

  /// Expects equal environments except for the variables in `different`, which both must have.
  static void expect_same(std::vector<Json> ours, std::vector<Json> theirs,
                          const Words& different) {
    for (size_t rank = 0; rank < 2; ++rank) {
      for (std::vector<Json>* all : {&ours, &theirs}) {
        Json& environment = (*all)[rank]["environment"];
        for (const std::string& name : different) {
          EXPECT_NE(environment.value(name, ""), "") << name;
          environment.erase(name);
        }
        erase_our_own(environment);
      }
      EXPECT_EQ(Json::diff(theirs[rank], ours[rank]), Json::array()) << "rank " << rank;
    }
  }
};

TEST_F(BesideTorchrun, EveryOptionIsThere) {
  const auto torchruns = run_program({python(), "-c", R"(
from torch.distributed.run import get_args_parser
for action in get_args_parser()._actions:
    print(*action.option_strings)
)"});
  ASSERT_EQ(torchruns.exit_code, 0) << torchruns.err;
  const std::string help = run_program({kLauncher, "--help", "all"}).out;
  std::istringstream options(torchruns.out);
  int found = 0;
  for (std::string option; options >> option; ++found) {
    // --help spells options with underscores.
    std::replace(option.begin() + 2, option.end(), '-', '_');
    EXPECT_THAT(help, ::testing::ContainsRegex("[ ,]" + option + "[ ,]"));
  }
  EXPECT_GT(found, 50) << "both spellings of 28 options";
}

TEST_F(BesideTorchrun, WorkersOfAStaticJobFindTheSame) {
  const Words options{"--nnodes=1",
                      "--node-rank=0",
                      "--master-addr=localhost",
                      fmt::format("--master-port={}", free_port()),
                      "--rdzv-id=job",
                      "--role=trainer",
                      "--max-restarts=2"};
  // On one node, rank 0 holds the store under syncbn-launch.
  expect_same(found(launch_command({}), options), found(torchrun(), options),
              {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"});
}

TEST_F(BesideTorchrun, WorkersWithAVirtualRankFindTheSame) {
  const Words options{"--standalone", "--run-path", "--virtual-local-rank"};
  const Environment env{{"CUDA_VISIBLE_DEVICES", "5,GPU-7"},
                        {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"}};
  expect_same(found(launch_command({}), options, env), found(torchrun(), options, env),
              {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID",
               "TORCHELASTIC_USE_AGENT_STORE"});
}

TEST_F(BesideTorchrun, WorkersOfTheOldLauncherFindTheSame) {
  const TempFolder folder;
  fs::create_symlink(kLauncher, folder / "torch.distributed.launch");
  const Words options{fmt::format("--master-port={}", free_port())};
  expect_same(found({folder / "torch.distributed.launch"}, options),
              found(torchrun("launch"), options),
              {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"});
}

TEST_F(BesideTorchrun, LogFoldersAreTheSame) {
  const auto logs_of = [](const Words& launcher) {
    const TempFolder folder;
    const auto result =
        run_program(launcher + Words{"--nproc-per-node=2", "--rdzv-id=job", "--log-dir=logs",
                                     "--redirects=0:2", "--tee=0:1,1:2", "--no-python", "sh", "-c",
                                     "echo stdout of $RANK; echo stderr of $RANK >&2"},
                    options_in(folder));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(names_in(folder / "logs").begin()->rfind("job_", 0), 0U);
    const fs::path attempt = attempt_in(folder / "logs");
    std::map<std::string, std::string> logs;
    for (const auto& entry : fs::recursive_directory_iterator(attempt)) {
      const std::string name = fs::relative(entry.path(), attempt);
      logs[name] = entry.is_directory() ? "a folder" : text_of(entry.path());
    }
    return logs;
  };
  const auto ours = logs_of(launch_command({}));
  EXPECT_EQ(ours, logs_of(torchrun()));
  EXPECT_EQ(ours.size(), 5U);
}

TEST_F(BesideTorchrun, RanksInRolesAreTheSame) {
  const auto ranks_of = [](const Words& launcher) {
    const TempFolder folder;
    const std::string port = fmt::format("--master-port={}", free_port());
    const std::string script =
        "env | grep -E '^(RANK|(LOCAL|GROUP|ROLE)_(RANK|NAME)|.*WORLD_SIZE)=' | sort > rank$RANK";
    std::deque<Program> nodes;
    for (const auto& [role, workers] : {std::pair{"a", 1}, std::pair{"b", 2}, std::pair{"b", 2}}) {
      nodes.emplace_back(
          launcher + Words{"--nnodes=3", fmt::format("--node-rank={}", nodes.size()),
                           "--master-addr=127.0.0.1", port,
                           fmt::format("--nproc-per-node={}", workers),
                           fmt::format("--role={}", role), "--no-python", "sh", "-c", script},
          options_in(folder));
    }
    std::string all;
    for (Program& node : nodes) {
      const auto result = node.wait();
      EXPECT_EQ(result.exit_code, 0) << result.err;
    }
    for (const char* rank : {"0", "1", "2", "3", "4"}) {
      all += text_of(folder / (std::string("rank") + rank));
    }
    return all;
  };
  const std::string ours = ranks_of(launch_command({}));
  EXPECT_EQ(ours, ranks_of(torchrun()));
  EXPECT_THAT(ours, ::testing::HasSubstr("RANK=4\nROLE_NAME=b\nROLE_RANK=3\nROLE_WORLD_SIZE=4\n"));
}

}  // namespace
}  // namespace syncbn::test

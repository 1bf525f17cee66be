// The cases of torchrun's own tests, run with syncbn-launch. docs/torchrun.md lists them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/cpus.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "launch/torchrun_cases.h"
#include "support/multiproc.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

namespace fs = std::filesystem;
// The arguments of most cases.
const Words kUsual{"--nnodes=1", "--rdzv-id=7", "--monitor-interval=1", "--start-method=spawn"};

// ---- launcher/test_run.py, launch_test.py, api_test.py -----------------------------------------

/// Runs programs whose workers each create a file named after their rank.
class TorchrunRunCases : public ::testing::Test {
 protected:
  /// The names of the files.
  std::set<std::string> ranks_of(const Words& options, const std::string& program,
                                 const Environment& env = {}) {
    const TempFolder folder;
    folder.write("touch.sh", "#!/bin/sh\ntouch \"$1/$RANK\"\n", true);
    folder.write("touch.py",
                 "import os, pathlib, sys\n"
                 "assert os.environ['SENTINEL'] == 'of the parent'\n"
                 "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n");
    fs::create_directory(folder / "ranks");
    RunProgramOptions run = options_in(folder, env);
    run.env["SENTINEL"] = "of the parent";
    exit_code_ = run_program(launch_command(options + Words{program, "ranks"}), run).exit_code;
    return names_in(folder / "ranks");
  }

  static std::set<std::string> ranks(int count) {
    std::set<std::string> names;
    for (int rank = 0; rank < count; ++rank) names.insert(std::to_string(rank));
    return names;
  }

  int exit_code_ = -1;
};

TEST_F(TorchrunRunCases, APythonScript) {
  EXPECT_EQ(ranks_of(kUsual + Words{"--nproc-per-node=4"}, "touch.py"), ranks(4));
}

TEST_F(TorchrunRunCases, AShellScriptWhichIsNoModule) {
  const Words words = kUsual + Words{"--nproc-per-node=4", "--no-python"};
  EXPECT_THAT(ranks_of(words + Words{"--module"}, "./touch.sh"), IsEmpty());
  EXPECT_EQ(exit_code_, 2);
  EXPECT_EQ(ranks_of(words, "./touch.sh"), ranks(4));
}

TEST_F(TorchrunRunCases, OptionsInTheEnvironment) {
  Environment env{{"PET_NNODES", "1"},
                  {"PET_NPROC_PER_NODE", "4"},
                  {"PET_RDZV_ID", "7"},
                  {"PET_MONITOR_INTERVAL", "1"},
                  {"PET_START_METHOD", "spawn"},
                  {"PET_NO_PYTHON", "1"},
                  {"PET_MODULE", "1"}};
  EXPECT_THAT(ranks_of({}, "./touch.sh", env), IsEmpty());
  EXPECT_EQ(exit_code_, 2);
  env["PET_MODULE"] = "0";
  EXPECT_EQ(ranks_of({}, "./touch.sh", env), ranks(4));
}

TEST_F(TorchrunRunCases, AWorkerForEachDevice) {
  const auto ranks_with = [this](const std::string& nproc, const std::string& gpus) {
    return ranks_of(kUsual + Words{"--nproc-per-node=" + nproc}, "./touch.sh",
                    {{"CUDA_VISIBLE_DEVICES", gpus}});
  };
  const int cores = base::usable_cpus();
  EXPECT_EQ(ranks_with("auto", ""), ranks(cores));
  EXPECT_EQ(ranks_with("cpu", "0,1,2"), ranks(cores));
  EXPECT_EQ(ranks_with("auto", "0,1,2"), ranks(3));
  EXPECT_EQ(ranks_with("gpu", "0,1,2"), ranks(3));
  for (const char* refused : {"unknown", "gpu"}) {
    EXPECT_THAT(ranks_with(refused, ""), IsEmpty());
    EXPECT_EQ(exit_code_, 2);
  }
}

TEST_F(TorchrunRunCases, OneNodeOfOneOrTwo) {
  // The quotes are part of the argument in torchrun's tests: no shell removes them.
  const Words elastic{"--nnodes=1:2",
                      "--nproc-per-node=4",
                      "--rdzv-backend=c10d",
                      fmt::format("--rdzv-endpoint=localhost:{}", free_port()),
                      "--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'",
                      "--rdzv-id=7",
                      "--monitor-interval=1",
                      "--start-method=spawn"};
  EXPECT_EQ(ranks_of(elastic, "touch.py"), ranks(4));
}

TEST_F(TorchrunRunCases, LogsWithALinePrefixTemplate) {
  const TempFolder folder;
  // "--redirect" abbreviates "--redirects".
  const auto result = run_program(
      Words{kLauncher} + kUsual +
          Words{"--nproc-per-node=4", "--redirect=3", "--tee=3", "--log-dir=logs", "sh", "-c",
                "echo creating $RANK"},
      options_in(folder, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: "}}));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(result.out, HasSubstr(fmt::format("[rank{0}]: creating {0}\n", rank)));
    const fs::path log = attempt_in(folder / "logs") / std::to_string(rank) / "stdout.log";
    EXPECT_EQ(text_of(log), fmt::format("creating {}\n", rank));
  }
}

TEST_F(TorchrunRunCases, WorkersKnowThatTorchelasticLaunchedThem) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const TempFolder folder;
  const std::string script = folder.write(
      "launched.py", "import torch.distributed as dist\nprint(dist.is_torchelastic_launched())");
  const RunProgramOptions options = options_in(folder);
  EXPECT_EQ(run_program({python(), script}, options).out, "False\n");
  EXPECT_EQ(run_program(launch_command({"--run-path", script}), options).out, "True\n");
  EXPECT_EQ(run_program(launch_command({"--logs_specs=default", script}), options).out, "True\n");
}

TEST_F(TorchrunRunCases, SeveralJobsOfOneNodeAtOneEndpoint) {
  const TempFolder folder;
  const std::string endpoint = fmt::format("--rdzv-endpoint=localhost:{}", free_port());
  const auto job = [&](const std::string& id) {
    return launch_command({"--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", endpoint,
                           "--rdzv-id=" + id, "sh", "-c",
                           "touch up" + id + "$RANK; while [ ! -e go ]; do sleep 0.01; done"});
  };
  Program first(job("a"), options_in(folder));
  Program second(job("b"), options_in(folder));
  for (const char* name : {"upa0", "upa1"}) {
    ASSERT_TRUE(first.wait_until([&] { return fs::exists(folder / name); })) << first.err();
  }
  for (const char* name : {"upb0", "upb1"}) {
    ASSERT_TRUE(second.wait_until([&] { return fs::exists(folder / name); })) << second.err();
  }
  folder.write("go", "");
  EXPECT_EQ(first.wait().exit_code, 0);
  EXPECT_EQ(second.wait().exit_code, 0);
}

constexpr const char* kInitMethod = R"(
import os, sys, torch, torch.distributed as dist
numbers = {}
if sys.argv[1].startswith("tcp"):
    numbers = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=sys.argv[1], **numbers)
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
)";

TEST_F(TorchrunRunCases, InitMethodsOnOneNode) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  for (const bool tcp : {true, false}) {
    const TempFolder folder;
    folder.write("init.py", kInitMethod);
    const int port = free_port();
    const auto result =
        run_program(launch_command({"--run-path", "--nproc-per-node=2", "--master-addr=localhost",
                                    fmt::format("--master-port={}", port), "init.py",
                                    tcp ? fmt::format("tcp://localhost:{}", port) : "env://"}),
                    options_in(folder));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, "sum 1\n"), 2) << result.out;
  }
}

// The launchers' store already listens on that address.
TEST_F(TorchrunRunCases, InitMethodTcpOnTwoNodes) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  Nodes nodes(2);
  nodes.folder().write("init.py", kInitMethod);
  nodes.start_all(1, {}, {"init.py", fmt::format("tcp://127.0.0.1:{}", nodes.port())});
  EXPECT_EQ(count(nodes.output(), "sum 1\n"), 2);
}

// ---- elastic/agent/server/test/local_elastic_agent_test.py --------------------------------------

TEST(TorchrunAgentCases, TheUsersVariablesAreHonoured) {
  const auto out = [](const std::string& name, const Environment& env) {
    return launch({"sh", "-c", "echo \"${" + name + "-unset}\""},
                  {.env = env, .unset = env.empty() ? Words{name} : Words{}})
        .out;
  };
  for (const char* name : {"TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_HEALTH_CHECK_PORT"}) {
    EXPECT_EQ(out(name, {}), "unset\n");
    EXPECT_EQ(out(name, {{name, "12345"}}), "12345\n");
  }
  const std::string nccl = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
  EXPECT_EQ(out(nccl, {}), "1\n");
  EXPECT_EQ(out(nccl, {{nccl, "0"}}), "0\n");
}

TEST(TorchrunAgentCases, SumOverEqualNodesWithACustomPrefix) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  Nodes nodes(2);
  nodes.folder().write("sum.py", kSumOfRanks);
  nodes.start_all(4, {"--role=sum", "--tee=3", "--prefix=[${role_name}-${local_rank}:${rank}]: "},
                  {"sum.py"});
  const std::string out = nodes.output();
  for (int rank = 0; rank < 8; ++rank) {
    const auto line = fmt::format("[sum-{}:{}]: rank {} of 8 sum 28\n", rank % 4, rank, rank);
    EXPECT_THAT(out, HasSubstr(line));
  }
}

TEST(TorchrunAgentCases, RemoteProcedureCallsBetweenRoles) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  Nodes nodes(2);
  nodes.folder().write("rpc.py", R"(
import os, torch.distributed.rpc as rpc
role = os.environ["ROLE_NAME"]
rpc.init_rpc(role, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
if role == "master":
    print(rpc.rpc_sync("worker", str.upper, args=("hello world",)))
rpc.shutdown()
)");
  nodes.start(0, 1, {"--role=master"}, {"rpc.py"});
  nodes.start(1, 1, {"--role=worker"}, {"rpc.py"});
  EXPECT_THAT(nodes.output(), HasSubstr("HELLO WORLD\n"));
}

// Ranks, both global ones and those within a role, continue from node to node.
TEST(TorchrunAgentCases, RanksInRolesOfUnequalNodes) {
  const std::vector<std::pair<std::string, int>> given{
      {"master", 8},  {"trainer", 1}, {"trainer", 2}, {"trainer", 3},
      {"trainer", 4}, {"ps", 5},      {"ps", 2}};
  Nodes nodes(static_cast<int>(given.size()));
  std::map<std::string, int> role_sizes;
  int world_size = 0;
  for (int node = 0; const auto& [role, workers] : given) {
    role_sizes[role] += workers;
    world_size += workers;
    nodes.start(node++, workers, {"--role=" + role, "--prefix=off"},
                shell("echo $RANK/$WORLD_SIZE node $GROUP_RANK $ROLE_NAME "
                      "$ROLE_RANK/$ROLE_WORLD_SIZE"));
  }
  const std::string out = nodes.output();
  std::map<std::string, int> role_ranks;
  int rank = 0;
  for (size_t node = 0; node < given.size(); ++node) {
    const auto& [role, workers] = given[node];
    for (int worker = 0; worker < workers; ++worker) {
      EXPECT_THAT(out, HasSubstr(fmt::format("{}/{} node {} {} {}/{}\n", rank++, world_size, node,
                                             role, role_ranks[role]++, role_sizes[role])));
    }
  }
}

/// torch's @record writes what a worker raised to a file. A launcher that itself runs under @record
/// passes the first such file on.
class TorchrunErrorCases : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
    folder_.write("sad.py", R"(import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("sad because I raise")
main()
)");
  }

  ProgramResult run(const Words& launcher) const {
    return run_program(launcher + Words{"sad.py"},
                       options_in(folder_, {{"TORCHELASTIC_ERROR_FILE", folder_ / "reply.json"}}));
  }
  std::string reply() const {
    const auto json = nlohmann::json::parse(text_of(folder_ / "reply.json"), nullptr, false);
    return json.is_discarded() ? "none" : json["message"]["message"].get<std::string>();
  }

  const TempFolder folder_;
};

TEST_F(TorchrunErrorCases, TheFirstErrorIsHandedOnAsTorchrunDoes) {
  const auto ours = run(launch_command({"--nproc-per-node=2"}));
  EXPECT_EQ(ours.exit_code, 1);
  EXPECT_THAT(ours.err, HasSubstr("RuntimeError: sad because I raise\n"));
  const std::string message = reply();
  EXPECT_EQ(message, "RuntimeError: sad because I raise");
  fs::remove(folder_ / "reply.json");
  EXPECT_EQ(run({python(), "-m", "torch.distributed.run", "--nproc-per-node=2"}).exit_code, 1);
  EXPECT_EQ(message, reply());
}

TEST_F(TorchrunErrorCases, ARunThatRecoversHandsNoErrorOn) {
  const auto result = run(launch_command({"--max-restarts=1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("RuntimeError: sad because I raise\n"));
  EXPECT_EQ(reply(), "none");
}

// ---- elastic/multiprocessing/api_test.py --------------------------------------------------------

const Words kHello{"sh", "-c", "echo hello stdout from $RANK; echo hello stderr from $RANK >&2"};

TEST(TorchrunProcessCases, RedirectsOfAllKinds) {
  for (int streams = 0; streams < 4; ++streams) {
    const TempFolder folder;
    const auto result = launch(Words{"--nproc_per_node=2", "--log-dir=logs", "--prefix=off",
                                     fmt::format("--redirects={}", streams)} +
                                   kHello,
                               {.cwd = folder.path()});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    for (const char* rank : {"0", "1"}) {
      const fs::path logs = attempt_in(folder / "logs") / rank;
      const auto expect_at_one_place = [&](bool redirected, const std::string& name,
                                           const std::string& shown) {
        const std::string line = fmt::format("hello {} from {}\n", name, rank);
        EXPECT_EQ(text_of(logs / (name + ".log")), redirected ? line : "no file");
        EXPECT_EQ(count(shown, line), redirected ? 0 : 1);
      };
      expect_at_one_place((streams & 1) != 0, "stdout", result.out);
      expect_at_one_place((streams & 2) != 0, "stderr", result.err);
    }
  }
}

TEST(TorchrunProcessCases, RedirectAndTeeByLocalRank) {
  const TempFolder folder;
  const auto result = launch(
      Words{"--nproc_per_node=2", "--log-dir=logs", "--redirects=0:2", "--tee=0:1,1:2"} + kHello,
      {.cwd = folder.path()});
  const fs::path logs = attempt_in(folder / "logs");
  EXPECT_EQ(text_of(logs / "0/stdout.log"), "hello stdout from 0\n");
  EXPECT_EQ(text_of(logs / "0/stderr.log"), "hello stderr from 0\n");
  EXPECT_EQ(text_of(logs / "1/stderr.log"), "hello stderr from 1\n");
  EXPECT_EQ(text_of(logs / "1/stdout.log"), "no file");
  EXPECT_THAT(result.out, AllOf(HasSubstr("[0] hello stdout from 0\n"),
                                HasSubstr("[1] hello stdout from 1\n")));
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("[1] hello stderr from 1\n"), Not(HasSubstr("hello stderr from 0"))));
}

}  // namespace
}  // namespace syncbn::test

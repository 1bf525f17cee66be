#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/words.h"
#include "options/command_line.h"
#include "options/option_table.h"
#include "options/scheduler.h"
#include "ssh/head_plan.h"
#include "support/environment_guard.h"
#include "support/temp_folder.h"
#include "support/text.h"
#include "support/thrown.h"
#include "workers/program.h"

namespace syncbn::launch {
namespace {

using test::Environment;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// @param line words as in a shell
LaunchOptions parse(const std::string& line) {
  const std::vector<std::string> words = shell_words("syncbn-launch " + line).value();
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const auto options = parse_options(static_cast<int>(argv.size()), argv.data());
  if (!options) throw base::InternalError("no options");
  return *options;
}

std::string error_of(const std::string& line) {
  return test::message_of<base::UserError>([&] { parse(line); });
}

TEST(LaunchOptionsTest, HasTorchrunsDefaults) {
  const LaunchOptions options = parse("prog");
  EXPECT_EQ(options.nproc_per_node, 1);
  EXPECT_EQ(options.nnodes.max, 1);
  EXPECT_EQ(options.node_rank, 0);
  EXPECT_EQ(options.role, "default");
  EXPECT_FALSE(options.master_port);
  EXPECT_FALSE(options.standalone);
  EXPECT_EQ(options.prefix, "[${host}:${rank}] ");
  EXPECT_EQ(options.shutdown_timeout, std::chrono::seconds(30));
  EXPECT_EQ(options.stdin_rank, 0);
  EXPECT_EQ(parse("--stdin=none prog").stdin_rank, -1);
  EXPECT_EQ(parse("--stdin=1 --nproc=2 prog").stdin_rank, 1);
  // Options of torchrun's without effect.
  parse("--monitor-interval=5 --start-method=spawn --logs-specs=default prog");
}

TEST(LaunchOptionsTest, OursDoNotMakeTorchrunsAbbreviationsAmbiguous) {
  const CommandLine line({"--no-p", "--v", "--local-r=0"}, CommandLine::Environment::kIsSettled);
  EXPECT_THAT(line.options(),
              ElementsAre("--no_python", "--virtual_local_rank", "--local_ranks_filter=0"));
}

TEST(LaunchOptionsTest, ReadsTheEnvironmentAndPrefersTheCommandLine) {
  const Environment three("PET_NPROC_PER_NODE", "3");
  EXPECT_EQ(parse("prog").nproc_per_node, 3);
  EXPECT_EQ(parse("--nproc_per_node=2 prog").nproc_per_node, 2);
}

TEST(LaunchOptionsTest, TakesAnEmptyTextForNoneAsTorchrun) {
  const LaunchOptions options = parse(
      "--rdzv_endpoint= --rdzv-conf '' --rdzv_id= --role= --log_dir= --local-addr= "
      "--local_ranks_filter= --duplicate-stdout-filters= --signals-to-handle= prog");
  EXPECT_EQ(options.ending_signals.size(), 4U);
  EXPECT_EQ(options.run_id, "none");
  EXPECT_EQ(options.role, "default");
  EXPECT_EQ(options.log_dir, "");
  EXPECT_EQ(options.master_addr, "");
  // The last one counts, also over a variable.
  const Environment job({{"PET_ROLE", "b"}, {"PET_RDZV_ID", "of-job"}, {"PET_LOG_DIR", "logs"}});
  const LaunchOptions last = parse("--role=a --role= --rdzv_id '' --log_dir= --log_dir=own prog");
  EXPECT_EQ(last.role, "default");
  EXPECT_EQ(last.run_id, "none");
  EXPECT_EQ(last.log_dir, "own");
  EXPECT_EQ(parse("--rdzv_endpoint=other:1 --rdzv_endpoint= prog").master_addr, "");
  // A shell's variable that is not set would start another job than was meant.
  for (const char* option : {"--nnodes=", "--hosts=", "--hostfile=", "--token_file="}) {
    EXPECT_THAT(error_of(option), HasSubstr("needs a value"));
  }
}

// Kubeflow's operators set these variables.
TEST(LaunchOptionsTest, ReadsTheEnvironmentOfKubernetesJobs) {
  const Environment kubeflow(
      {{"PET_N_PROC_PER_NODE", "3"}, {"PET_STANDALONE", ""}, {"PET_MODULE", "0"}});
  const LaunchOptions options = parse("prog");
  EXPECT_EQ(options.nproc_per_node, 3);
  EXPECT_TRUE(options.standalone);
  EXPECT_FALSE(options.module);
  EXPECT_THAT(options.given, ElementsAre("--nproc_per_node=3", "--standalone", "--module=0"));
  EXPECT_TRUE(parse("--module prog").module);
}

TEST(LaunchOptionsTest, ReadsStreamsAsTorchrun) {
  const LaunchOptions all = parse("-r 3 -t2 --nproc=2 prog");
  EXPECT_TRUE(all.redirects.of(1).out && all.redirects.of(1).err);
  EXPECT_TRUE(!all.tee.of(0).out && all.tee.of(0).err);
  const LaunchOptions some = parse("--redirects=0:1,11:2 --nproc=12 prog");
  EXPECT_TRUE(some.redirects.of(0).out && !some.redirects.of(0).err);
  EXPECT_TRUE(!some.redirects.of(11).out && some.redirects.of(11).err);
  EXPECT_FALSE(some.redirects.of(5).out || some.redirects.of(5).err);
  // One command line serves any number of workers.
  EXPECT_TRUE(parse("'--tee=0:3, 1:3' --nproc=1 prog").tee.of(0).err);
  EXPECT_THAT(parse("'--local_ranks_filter=0, 1' --nproc=2 prog").local_ranks_filter,
              ElementsAre(0, 1));
}

// Like torchrun, whose argparse consumes them.
TEST(LaunchOptionsTest, TakesDashesRightBehindTheProgramAway) {
  EXPECT_THAT(parse("script.py -- --foo").program, ElementsAre("script.py", "--foo"));
  EXPECT_THAT(parse("script.py a -- --foo").program, ElementsAre("script.py", "a", "--", "--foo"));
}

TEST(LaunchOptionsTest, SplitsFiltersAtSingleCommas) {
  EXPECT_THAT(parse("--duplicate_stdout_filters=apple,a,,b, prog").duplicate_stdout_filters,
              ElementsAre("apple", "a,b"));
}

TEST(LaunchOptionsTest, TakesTheMasterFromTheEndpoint) {
  const LaunchOptions both = parse("--rdzv_endpoint=node0:1234 prog");
  EXPECT_EQ(both.master_addr, "node0");
  EXPECT_EQ(both.master_port, 1234);
  const LaunchOptions six = parse("--rdzv-endpoint [::1]:7 prog");
  EXPECT_EQ(six.master_addr, "::1");
  EXPECT_EQ(six.master_port, 7);
  EXPECT_EQ(parse("--master_addr=[::1] prog").master_addr, "::1");
  EXPECT_FALSE(parse("--rdzv_endpoint=node0 prog").master_port);
  EXPECT_EQ(parse("--standalone --rdzv_endpoint=node0:1 prog").master_addr, "");
}

TEST(LaunchOptionsTest, ReadsTorchrunsSettingsOfTheRendezvous) {
  const LaunchOptions options = parse(
      "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=host --rdzv-conf=join_timeout=5,"
      "last_call_timeout=0,is_host=False,keep_alive_interval=1,keep_alive_max_attempt=2,"
      "close_timeout=9 true");
  EXPECT_EQ(options.nnodes.str(), "2:4");
  EXPECT_EQ(options.join_timeout, std::chrono::seconds(5));
  EXPECT_EQ(options.last_call, std::chrono::seconds(0));
  EXPECT_EQ(options.alive_period, std::chrono::seconds(1));
  EXPECT_EQ(options.alive_misses, 2);
  EXPECT_EQ(options.is_host, false);
}

// torchrun's own tests pass it like this, in a list of arguments.
TEST(LaunchOptionsTest, TakesQuotesOffTheSettingsOfTheRendezvous) {
  const LaunchOptions options = parse(
      "--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=host "
      "\"--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=x'\" true");
  EXPECT_EQ(options.join_timeout, std::chrono::seconds(5));
  EXPECT_EQ(options.last_call, std::chrono::seconds(1));
  EXPECT_EQ(parse("--rdzv-conf=timeout=7 true").join_timeout, std::chrono::seconds(7));
}

TEST(LaunchOptionsTest, NodesMayChangeWhereTheUserAskedForIt) {
  const auto may_change = [](const std::string& words) {
    return parse(words + " --rdzv-endpoint=host true").nodes_may_change();
  };
  EXPECT_TRUE(may_change("--nnodes=1:2 --rdzv-backend=c10d"));
  EXPECT_TRUE(may_change("--nnodes=2 --rdzv-backend=c10d --max-restarts=1"));
  EXPECT_FALSE(may_change("--nnodes=2 --rdzv-backend=c10d"));
  EXPECT_FALSE(may_change("--nnodes=1 --rdzv-backend=c10d --max-restarts=1"));
  EXPECT_FALSE(may_change("--nnodes=2 --node-rank=0 --max-restarts=1"));
}

TEST(LaunchOptionsTest, TellsTheLocalRankAsTheOldLauncherOnRequest) {
  EXPECT_EQ(parse("prog").local_rank_arg, "");
  EXPECT_EQ(parse("--use_env prog").local_rank_arg, "");
  EXPECT_EQ(parse("--use_env=True prog").local_rank_arg, "");
  EXPECT_EQ(parse("--no-use-env prog").local_rank_arg, "--local-rank");
  EXPECT_EQ(parse("--use_env=False prog").local_rank_arg, "--local-rank");
  EXPECT_EQ(parse("--no-use-env --local-rank-arg=--local_rank prog").local_rank_arg,
            "--local_rank");
  const auto called = [](std::vector<const char*> words) {
    return parse_options(static_cast<int>(words.size()), words.data())->local_rank_arg;
  };
  EXPECT_EQ(called({"/opt/bin/torch.distributed.launch", "prog"}), "--local-rank");
  EXPECT_EQ(called({"torch.distributed.launch", "--use_env", "prog"}), "");
}

TEST(LaunchOptionsTest, NumbersAreDecimalAndTheLastOneCounts) {
  EXPECT_EQ(parse("--max_restarts=010 prog").max_restarts, 10);
  EXPECT_EQ(parse("--master_port=08 prog").master_port, 8);
  EXPECT_EQ(parse("--max_restarts=1 --max_restarts=2 prog").max_restarts, 2);
  EXPECT_EQ(parse("--max_restarts=5/10min prog").max_restarts, 5);
  EXPECT_EQ(parse("--max_restarts=5/10min prog").restart_window, std::chrono::seconds(600));
  using std::chrono::milliseconds;
  EXPECT_EQ(parse("--hang_timeout=1.5h prog").hang_timeout, milliseconds(5'400'000));
  EXPECT_EQ(parse("--shutdown_timeout=500ms prog").shutdown_timeout, milliseconds(500));
  EXPECT_EQ(parse("--rdzv_conf=join_timeout=10min prog").join_timeout, milliseconds(600'000));
}

TEST(LaunchOptionsTest, StandaloneOverrulesAddressAndPort) {
  const Environment master("PET_MASTER_ADDR", "job-master-0");
  const LaunchOptions options = parse("--standalone --master_port=1 prog");
  EXPECT_EQ(options.master_addr, "");
  EXPECT_FALSE(options.master_port);
}

TEST(LaunchOptionsTest, NamesTheEnvironmentVariableThatIsWrong) {
  {
    const Environment rank("PET_NODE_RANK", "many");
    EXPECT_EQ(error_of("prog"),
              "environment variable PET_NODE_RANK: --node_rank: expected a number from 0 to "
              "65535, got 'many'");
  }
  {
    const Environment nnodes("PET_NNODES", "a");
    EXPECT_THAT(error_of("prog"),
                StartsWith("environment variable PET_NNODES: --nnodes=a: expected"));
  }
  {
    const Environment hosts("SYNCBN_HOSTS", "a");
    EXPECT_THAT(error_of("--standalone prog"),
                StartsWith("environment variable SYNCBN_HOSTS: --hosts and --standalone"));
  }
  // Idle without hosts.
  const Environment head(
      std::map<std::string, std::string>{{"SYNCBN_EXPORT", "A,"}, {"SYNCBN_SSH_PORT", "22"}});
  EXPECT_EQ(parse("prog").nproc_per_node, 1);
  EXPECT_THAT(error_of("-H a prog"),
              StartsWith("environment variable SYNCBN_EXPORT: --export=A,: ''"));
}

TEST(LaunchOptionsTest, CountsGpusAsCudaWould) {
  const Environment three("CUDA_VISIBLE_DEVICES", "0,2,GPU-abc,-1,3");
  EXPECT_EQ(parse("--nproc_per_node=gpu prog").nproc_per_node, 3);
  EXPECT_EQ(parse("--nproc_per_node=auto prog").nproc_per_node, 3);
  EXPECT_TRUE(parse("--nproc_per_node=gpu prog").gpu_per_worker);
  EXPECT_TRUE(parse("--nproc_per_node=auto prog").gpu_per_worker);
  EXPECT_FALSE(parse("--nproc_per_node=2 prog").gpu_per_worker);
  EXPECT_TRUE(parse("--nproc_per_node=2 --virtual_local_rank prog").gpu_per_worker);
  const Environment none("CUDA_VISIBLE_DEVICES", "");
  EXPECT_FALSE(parse("--nproc_per_node=auto prog").gpu_per_worker);
  EXPECT_THAT(error_of("--nproc_per_node=gpu prog"), HasSubstr("no GPU is visible"));
  const int cpu = parse("--nproc_per_node=cpu prog").nproc_per_node;
  EXPECT_GE(cpu, 1);
  EXPECT_EQ(parse("--nproc_per_node=auto prog").nproc_per_node, cpu);
}

TEST(LaunchOptionsTest, ReadsWhereWorkersAreBound) {
  EXPECT_EQ(parse("prog").binding, Binding::kNone);
  EXPECT_EQ(parse("--bind=cores prog").binding, Binding::kCores);
  EXPECT_EQ(parse("--numa-binding=node prog").binding, Binding::kNode);
  EXPECT_EQ(parse("--numa-binding=socket prog").binding, Binding::kSocket);
  EXPECT_EQ(parse("--numa-binding=exclusive --bind=none prog").binding, Binding::kExclusive);
  const Environment mode("PET_NUMA_BINDING", "socket");
  EXPECT_EQ(parse("prog").binding, Binding::kSocket);
}

TEST(LaunchOptionsTest, ReadsWhereEventsGo) {
  EXPECT_EQ(parse("prog").events, EventTarget::kNone);
  EXPECT_EQ(parse("--event-log-handler=null prog").events, EventTarget::kNone);
  EXPECT_EQ(parse("--event-log-handler=console prog").events, EventTarget::kConsole);
  EXPECT_EQ(parse("--event-log-handler=json prog").events, EventTarget::kLogFolder);
  const Environment file("PET_EVENT_LOG_HANDLER", "json:a/b:c");
  EXPECT_EQ(parse("prog").events, EventTarget::kFile);
  EXPECT_EQ(parse("prog").events_file, "a/b:c");
  EXPECT_THAT(parse("-r3 --standalone prog").given,
              ElementsAre("--redirects=3", "--standalone", "--event_log_handler=json:a/b:c"));
}

TEST(LaunchOptionsTest, ARemovedOptionNamesItsReplacement) {
  const std::vector<std::pair<std::string, std::string>> removed{
      {"include", "name only the hosts to use in --hosts or --hostfile"},
      {"exclude", "name only the hosts to use in --hosts or --hostfile"},
      {"man", "read --help all"},
      {"ssh_all", "write USER@HOST in --hosts or --hostfile"},
      {"tls", "a private network or WireGuard encrypts all of a job's messages"}};
  for (const auto& [name, replacement] : removed) {
    const auto message = StartsWith(fmt::format("--{} has been removed: {}", name, replacement));
    for (std::string option : {"--" + name, "--" + name + "=a"}) {
      EXPECT_THAT(error_of("--hosts=a,b " + option + " prog"), message);
      std::ranges::replace(option.begin() + 2, option.end(), '_', '-');
      EXPECT_THAT(error_of(option + " a prog"), message);
    }
  }
}

TEST(LaunchOptionsTest, NamesWhatIsWrong) {
  const std::vector<std::pair<std::string, const char*>> cases{
      {"--nproc_per_node=", "the option '--nproc_per_node' needs a value"},
      {"--nproc_per_nod3=1", "did you mean '--nproc_per_node'"},
      {"--no", "the option '--no' is ambiguous: --node_rank, --no_python"},
      {"-z", "unknown option '-z'"},
      {"-np 4", "--nproc_per_node=N"},
      {"--bind=cores --numa_binding=node", "exclude each other"},
      {"--event_log_handler=jsn", "expected null, console, json or json:FILE"},
      {"--event_log_handler=jsn", "did you mean 'json'"},
      {"--event_log_handler=json:", "expected null"},
      {"--rdzv_backend=c10", "did you mean 'c10d'"},
      {"--numa_binding=nodes", "did you mean 'node'"},
      {"--bind=core", "did you mean 'cores'"},
      {"--rdzv_endpoint=:1", "expected HOST:PORT"},
      {"--rdzv_endpoint=h:70000", "expected HOST:PORT"},
      {"--redirects=4", "--redirects=4: expected 0 (none)"},
      {"--stdin=first", "expected a rank, or none"},
      {"--stdin=2 --nproc_per_node=2", "--stdin=2: the job has 2 workers, with ranks from 0"},
      {"--stdin=0 --hosts=a", "exclude each other"},
      {"--logs-specs=plugin", "expected one of default"},
      {"--completion=fish", "expected one of bash, zsh"},
      {"--local-rank-arg=--rank", "needs --no_use_env"},
      {"--local_ranks_filter=0,a", "got 'a'"},
      {"--local_ranks_filter=0,", "got ''"},
      {"--signals_to_handle=SIGTERM,SIGFOO", "'SIGFOO'"},
      {"-m --no_python", "leave one of them out"},
      {"--use_env --no_use_env", "exclude"},
      {"--standalone=maybe", "--standalone: expected true or false, got 'maybe'"},
      {"--master_port=70000", "--master_port: expected a number from 0 to 65535"},
      {"--exclude_failing=3", "needs --nnodes=MIN:MAX"},
      {"--rdzv-conf=join_timout=5", "did you mean 'join_timeout'"},
      {"--rdzv-conf=keep_alive_max_attempt=2147483647",
       "keep_alive_max_attempt is a whole number from 1 to 10000"},
      {"--rdzv_conf=keep_alive_interval=500ms",
       "keep_alive_interval=500ms: expected a time from 1 s"},
      {"--rdzv_conf=is_host=", "--rdzv_conf=is_host=: is_host is true or false, got ''"},
      {"--rdzv_conf=join_timeout=",
       "--rdzv_conf=join_timeout=: join_timeout=: expected a time from 1 s"},
      {"--standalone --nnodes=2 --node_rank=0", "--standalone"},
      {"--nnodes=2 --master_addr=a", "needs --node_rank"},
      {"--nnodes=2 --node_rank=0", "needs --master_addr"},
      {"--nnodes=2 --node_rank=2 --master_addr=a",
       "--node_rank=2 needs more nodes than --nnodes=2"},
      {"--nnodes=2 --node_rank=0 --master_addr=a --master_port=0", "--master_port=0"},
      {"--hosts=a --nnodes=2", "--hosts and --nnodes exclude"},
      {"--hosts=a --node_rank=0", "--hosts and --node_rank exclude"},
      {"--hosts=a --standalone", "--hosts and --standalone exclude"},
      {"--hosts=a --rdzv_backend=c10d", "--hosts and --rdzv_backend exclude"},
      {"--hosts=a --rdzv_endpoint=a", "--hosts and --rdzv_endpoint exclude"},
      {"--hosts=a --local_addr=a", "--hosts and --local_addr exclude"},
      {"--hosts=a --hostfile=b", "exclude each other"},
      {"--ssh_port=22", "--ssh_port needs --hosts"},
      {"-H a \"--ssh_options=-o 'x\"", "a quote is not closed"},
      {"--hosts=a --ssh_timeout=0.05", "--ssh_timeout=0.05: expected a time from 0.1 s to 86400 s"},
      {"--hosts=a \"--export=B,A=x y\"",
       "--export=B,A=x y: 'A=x y' is not the name of a variable; its value comes from the "
       "environment: A='x y' syncbn-launch --export=A"},
  };
  for (const auto& [words, message] : cases) {
    EXPECT_THAT(error_of(words + " prog"), HasSubstr(message));
  }
  EXPECT_THAT(error_of(""), HasSubstr("no program given"));
  EXPECT_THAT(error_of("--nnodes"), HasSubstr("'--nnodes' needs a value"));
}

TEST(LaunchOptionsTest, NamesEachValueThatHasNotItsOptionsForm) {
  struct Case {
    std::string option, bad;  // values with blanks between
    const char* message;      // after "OPTION=VALUE: "
  };
  for (const auto& [option, bad, message] : std::vector<Case>{
           {"--nproc_per_node", "0 -1 x 1.5 99999", "expected a number from 1 to 4096, or"},
           {"--nnodes", "0 x 2:1 1:2:3 1: :2", "expected a number from 1 to 65536, or a range"},
           {"--max_restarts", "1.5 +1 -1 99999999999 5/ 5/h 5/1w /1h 5/0s",
            "expected a number from 0 to 1000000, or one within a time, as 5/1h"},
           {"--tee", "0:3,1 1,0:1 0:1, 11 0: :1 ,", "expected 0 (none), 1 (stdout)"},
           {"--shutdown_timeout", "nan -1 1w m 1.5.2s 25h 1e3", "expected a time from 0 s to"},
           {"--hosts=a --export", "1A 'A B' $A =x A;B ! !!A A-B -A",
            "'{}' is not the name of a variable; expected NAME"}}) {
    const std::vector<std::string> values = shell_words(bad).value();
    for (const std::string& value : values) {
      const std::string words = fmt::format("{}={}", option, value);
      EXPECT_THAT(error_of(fmt::format("{}={} a", option, shell_quoted({value}))),
                  StartsWith(words.substr(words.rfind(" --") + 1) + ": " +
                             fmt::format(fmt::runtime(message), value)));
    }
  }
}

TEST(HeadPlanTest, EachNodeGetsItsRankItsWorkersAndTheOtherOptions) {
  const test::TempFolder folder;
  const std::string file = folder.write("hosts", "me@a slots=2  # two\nme@b\n");
  EXPECT_EQ(parse("--hostfile=" + file + " prog").head.hosts.size(), 2U);
  const Environment hosts("SYNCBN_HOSTFILE", file);
  const auto nodes = plan_nodes(parse("--nproc_per_node=3 --ssh_user=x prog --arg"));
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_THAT(
      nodes[0].words,
      ElementsAre("syncbn-launch", "--nproc_per_node=3", "--nproc_per_node=2", "--nnodes=2",
                  "--node_rank=0", "--local_addr=a", "--master_addr=a", "--", "prog", "--arg"));
  EXPECT_THAT(nodes[1].words,
              ElementsAre("syncbn-launch", "--nproc_per_node=3", "--nnodes=2", "--node_rank=1",
                          "--local_addr=b", "--master_addr=a", "--", "prog", "--arg"));
}

std::string help_on(const char* topic) {
  ::testing::internal::CaptureStdout();
  const char* argv[] = {"syncbn-launch", "--help", topic};
  EXPECT_FALSE(parse_options(topic == nullptr ? 2 : 3, argv));
  return ::testing::internal::GetCapturedStdout();
}

TEST(LaunchOptionsTest, HelpIsWordForWordTheGoldenFile) {
  EXPECT_EQ(help_on(nullptr) + help_on("all"),
            base::read_file(SYNCBN_SOURCE_DIR "/tests/launch/help.txt"))
      << "if the change is meant: (syncbn-launch --help; syncbn-launch --help all) > "
         "tests/launch/help.txt";
}

TEST(LaunchOptionsTest, HelpShowsTheGroupOrTheOptionThatIsAskedFor) {
  const std::string all = help_on("all");
  EXPECT_LE(test::count(help_on(nullptr), "\n"), 31) << "a screenful";
  EXPECT_EQ(help_on("train.py"), help_on(nullptr));
  for (const char* topic : {"workers", "nodes", "ssh", "failures", "program", "output", "about"}) {
    EXPECT_THAT(help_on(nullptr), HasSubstr(fmt::format("\n  {} ", topic)));
    EXPECT_THAT(all, HasSubstr("\n\n" + help_on(topic))) << topic;
  }
  EXPECT_THAT(help_on("ssh"), StartsWith("Nodes over ssh:\n  -H,--hosts HOSTS "));
  EXPECT_THAT(help_on("hang-timeout"), StartsWith("  --hang_timeout TIME "));
}

TEST(LaunchSchedulerTest, TakesNodesFromAStepOfSlurm) {
  const Environment slurm({{"SLURM_STEP_NUM_NODES", "4"},
                           {"SLURM_STEP_NUM_TASKS", "4"},
                           {"SLURM_NODEID", "2"},
                           {"SLURM_STEP_NODELIST", "gpu[03-05,9]"},
                           {"SLURM_JOB_ID", "123456"}});
  const LaunchOptions options = parse("--nproc_per_node=8 prog");
  EXPECT_EQ(options.nnodes.max, 4);
  EXPECT_EQ(options.node_rank, 2);
  EXPECT_EQ(options.master_addr, "gpu03");
  EXPECT_EQ(options.master_port, 29500 + 123456 % 2000);
  EXPECT_EQ(options.run_id, "123456.0");
  EXPECT_EQ(parse("--rdzv_id=mine prog").run_id, "mine");
  EXPECT_EQ(parse("--standalone prog").nnodes.max, 1);
  EXPECT_EQ(parse("--nnodes=1 prog").nnodes.max, 1);
  EXPECT_EQ(parse("--nnodes=4 prog").node_rank, 2);
  EXPECT_THAT(error_of("--nnodes=3 prog"), HasSubstr("--nnodes=3 needs --node_rank"));
  EXPECT_EQ(parse("--master_addr=x --master_port=5 prog").master_port, 5);
  const Environment several(std::map<std::string, std::string>{{"SLURM_STEP_NUM_TASKS", "16"}});
  EXPECT_THAT(error_of("prog"), HasSubstr("srun --ntasks-per-node=1"));
}

// `srun … & srun … & wait`: steps on the same nodes at the same time.
TEST(LaunchSchedulerTest, KeepsTheStepsOfAJobOfSlurmApart) {
  // The job ids of a federation use all 32 bits.
  const Environment slurm({{"SLURM_STEP_NUM_NODES", "2"},
                           {"SLURM_NODEID", "0"},
                           {"SLURM_STEP_NODELIST", "a,b"},
                           {"SLURM_JOB_ID", "4227858432"},
                           {"SLURM_STEP_ID", "0"}});
  const LaunchOptions first = parse("prog");
  const Environment second(std::map<std::string, std::string>{{"SLURM_STEP_ID", "1"}});
  const LaunchOptions next = parse("prog");
  EXPECT_EQ(first.run_id, "4227858432.0");
  EXPECT_EQ(next.run_id, "4227858432.1");
  EXPECT_NE(first.master_port, next.master_port);
}

// Without srun there is one launcher, however many nodes the allocation has.
TEST(LaunchSchedulerTest, ABatchScriptOfSlurmIsOneNode) {
  const Environment slurm({{"SLURM_NNODES", "4"}, {"SLURM_NODEID", "0"}, {"SLURM_JOB_ID", "1"}});
  EXPECT_EQ(parse("prog").nnodes.max, 1);
}

TEST(LaunchSchedulerTest, OpenMpiSaysNoMaster) {
  const Environment mpi({{"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  EXPECT_THAT(error_of("prog"),
              HasSubstr("Open MPI, which starts 2 launchers, needs --master_addr"));
  EXPECT_EQ(parse("--master_addr=a prog").node_rank, 1);
  EXPECT_EQ(parse("--nnodes=2 --node_rank=0 --master_addr=a prog").node_rank, 0);
}

TEST(LaunchSchedulerTest, TakesTheRankOfAnIndexedKubernetesJob) {
  const Environment job("JOB_COMPLETION_INDEX", "3");
  EXPECT_EQ(parse("--nnodes=4 --master_addr=job-0.svc prog").node_rank, 3);
  EXPECT_EQ(parse("prog").node_rank, 0);
  // Each pod runs its own job.
  EXPECT_EQ(parse("--nnodes=1 prog").node_rank, 0);
}

TEST(LaunchSchedulerTest, FindsTheFirstNameInSlurmsLists) {
  EXPECT_EQ(first_slurm_node("a"), "a");
  EXPECT_EQ(first_slurm_node("a,b[1-2]"), "a");
  EXPECT_EQ(first_slurm_node("b[1-2],a"), "b1");
  EXPECT_EQ(first_slurm_node("n[007,9-11]-ib,x"), "n007-ib");
  EXPECT_EQ(first_slurm_node("rack-2-gpu[5]"), "rack-2-gpu5");
}

std::string warning_of(const std::vector<std::string>& words) {
  return local_rank_warning({}, {.file = words[0], .argv = words});
}

TEST(LocalRankWarningTest, ComesUnlessTheScriptUsesTheVariableOfItsLocalRank) {
  const test::TempFolder folder;
  const auto warning = [&](const std::string& line) {
    folder.write("script.py", line + "\nparser.add_argument('--local_rank')\n");
    return warning_of({folder / "script.py"});
  };
  for (const char* use :
       {"rank = os.environ['LOCAL_RANK']", "LOCAL_RANK = int(os.environ[\"LOCAL_RANK\"])",
        "default=int(os.getenv('LOCAL_RANK', 0))", "if os.environ['LOCAL_RANK'] == '0': pass",
        "if 'LOCAL_RANK' not in os.environ:",
        "print(os.environ['LOCAL_RANK'])\nrank = os.environ['LOCAL_RANK']",
        "'''don't'''\nmodel = Net().to(f\"cuda:{os.environ['LOCAL_RANK']}\")",
        "del x  # it's\nrank = os.getenv('LOCAL_RANK')",
        "'local_rank': int(os.environ['LOCAL_RANK']),",
        "parse('--x', default=int(os.environ.get('LOCAL_RANK', 0)), help='of this node')",
        "r = int(os.environ['LOCAL_RANK']); print(r)",
        "line.startswith('\"\"\"')\nrank = os.environ['LOCAL_RANK']",
        "# \"\"\"\nrank = os.environ['LOCAL_RANK']\n# \"\"\"",
        "env=os.environ\nrank = int(env[\"LOCAL_RANK\"])",
        "self.env = environ.copy()\nrank = self.env.get('LOCAL_RANK')"}) {
    EXPECT_EQ(warning(use), "") << use;
  }
  for (const char* mention : {"# os.environ['LOCAL_RANK'] is not read",
                              "x = 1#os.environ['LOCAL_RANK']",
                              "help = 'like LOCAL_RANK'",
                              "os.environ['LOCAL_RANK'] = str(args.local_rank)",
                              "print(os.environ['LOCAL_RANK'])",
                              "logging.info(os.environ['LOCAL_RANK'])",
                              "for name in ('RANK', 'LOCAL_RANK'): pass",
                              "for name in ('LOCAL_RANK', 'RANK'): pass",
                              "names = ['LOCAL_RANK', 'RANK']",
                              "os.environ.setdefault('LOCAL_RANK', '0')",
                              "os.environ.pop('LOCAL_RANK')",
                              "if x:\n  del os.environ['LOCAL_RANK']",
                              "os.putenv('LOCAL_RANK', '0')",
                              "warnings.warn('is ' + os.environ['LOCAL_RANK'])",
                              "parse('--x', help='use os.environ[\"LOCAL_RANK\"]')",
                              "\"\"\"Set by the launcher:\nrank = os.environ['LOCAL_RANK']\n\"\"\"",
                              "line.startswith('\"\"\"')",
                              "# \"\"\"\nprint(os.environ['LOCAL_RANK'])",
                              "env = os.environ.copy()\nenv['LOCAL_RANK'] = '0'",
                              "env = {}\nx = env['LOCAL_RANK']",
                              "parse('--color', default='#fff')  # os.environ['LOCAL_RANK']",
                              "print('Read the rank from',\n      'os.environ[\"LOCAL_RANK\"]')"}) {
    EXPECT_THAT(warning(mention), HasSubstr("declares --local_rank")) << mention;
  }
}

TEST(LocalRankWarningTest, FindsTheScriptAmongTheWordsOfACommand) {
  const test::TempFolder folder;
  const std::string declares = "parser.add_argument('--local_rank')\n";
  const std::string script = folder.write("s.py", declares);
  const std::string other = folder.write("other.py", "");
  const std::string tool = folder.write("tool", "#!/usr/bin/env python3\n" + declares);
  const std::string text = folder.write("text", declares);
  std::filesystem::create_directory(folder / "pkg");
  folder.write("pkg/__main__.py", declares);
  folder.write("pkg/mod.py", declares);
  const Environment here(
      std::map<std::string, std::string>{{"PYTHONPATH", "/nonexistent:" + folder.path().string()},
                                         {"PYTHON_EXEC", "/opt/interpreter"}});
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"python3", script},
                                             {"python3.13t", "-u", script, other},
                                             {"/usr/bin/python3", "-W", "ignore", "-Xdev", script},
                                             {"python3", "-u", "-c", "import runpy", text},
                                             {"/opt/interpreter", "-u", text},
                                             {"env", "X=1", "python3", "-u", script},
                                             {"env", "X=1", script},
                                             {"uv", "run", script},
                                             {"numactl", "-N0", tool},
                                             {tool, "--lr=1"}}) {
    EXPECT_THAT(warning_of(words), HasSubstr(" declares --local_rank")) << words[0];
  }
  EXPECT_THAT(warning_of({"python3", "-um", "pkg.mod"}), StartsWith("pkg.mod declares"));
  EXPECT_THAT(warning_of({"python3", "-m", "pkg", "x"}), StartsWith("pkg declares"));
  EXPECT_THAT(warning_of({"python3", "-mpkg", "x"}), StartsWith("pkg declares"));
  const std::string comment = folder.write("comment.py", "x = 1\n  # " + declares + "#" + declares);
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"python3", other, script},
                                             {"python3", script, "--local_rank=0"},
                                             {"python3", "-m", "json.tool", script},
                                             {"python3", "-m"},
                                             {"python3", "-", script},
                                             {"python3", "-c", "print(1)", script},
                                             {"python3", "-cprint(1)", script},
                                             {"python3", "-c"},
                                             {"python3", comment},
                                             {"cat", text},
                                             {other}}) {
    EXPECT_EQ(warning_of(words), "") << words.back();
  }
}

TEST(LocalRankArgumentTest, StandsBehindTheScript) {
  const test::TempFolder folder;
  const std::string script = folder.write("s.py", "parser.add_argument('--local_rank')\n");
  LaunchOptions options;
  options.local_rank_arg = "--local-rank";
  options.program = {"env", "X=1", "python3", "-u", script, "--lr=1"};
  EXPECT_THAT(worker_argv(resolve_program(options), 1),
              ElementsAre("env", "X=1", "python3", "-u", script, "--local_rank=1", "--lr=1"));
  options.program = {"env", "X=1", script};
  EXPECT_THAT(worker_argv(resolve_program(options), 1),
              ElementsAre("env", "X=1", script, "--local_rank=1"));
  for (const std::vector<std::string>& code : std::vector<std::vector<std::string>>{
           {"python3", "-c", "print(1)"}, {"python3", "-cprint(1)"}}) {
    options.program = code;
    options.program.push_back("--lr=1");
    EXPECT_EQ(worker_argv(resolve_program(options), 1)[code.size()], "--local-rank=1");
  }
  options.program = {"echo", "x"};
  EXPECT_THAT(worker_argv(resolve_program(options), 1), ElementsAre("echo", "--local-rank=1", "x"));
}

}  // namespace
}  // namespace syncbn::launch

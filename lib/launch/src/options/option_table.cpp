#include "options/option_table.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <map>

namespace syncbn::launch {
void TypedOptions::describe(config::Schema<TypedOptions>& schema) {
  using Typed = TypedOptions;
  // Each option added by one of these is also set by the variable <prefix><NAME>.
  const auto set_by = [&schema](const char* prefix, unsigned tags) {
    return [&schema, prefix, tags](const std::string& name, auto member, const char* value_name,
                                   const std::string& help, unsigned more = 0) -> config::Rules& {
      std::string variable = prefix + name;
      for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      return schema.field(name, member, help)
          .value_name(value_name)
          .environment({variable})
          .tags(tags | more);
    };
  };
  const auto torchruns = set_by("PET_", kTorchruns);
  const auto ours = set_by("SYNCBN_", 0);

  schema.group("Workers", kAboutRun);
  torchruns("nproc_per_node", &Typed::nproc_per_node_text, "N|cpu|gpu|auto",
            "Workers on this machine: a number, cpu (one per core), "
            "gpu (one per GPU), auto (gpu where there is one, else cpu)",
            kMostUsed)
      .environment({"PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE"});
  torchruns("role", &Typed::role, "NAME", "What the workers find as ROLE_NAME", kMayBeEmpty);
  torchruns("virtual_local_rank", &Typed::virtual_local_rank, "",
            "Each worker has LOCAL_RANK=0 and sees its GPU as the only one");
  torchruns("numa_binding", &Typed::numa_binding, "",
            "Bind each worker to the cores near its GPU (without GPUs, spread "
            "evenly): of the NUMA node, of its socket, or to a share of the node's")
      .one_of({"node", "socket", "exclusive"});
  ours("bind", &Typed::bind, "", "cores: bind each worker to its own share of this machine's cores")
      .one_of({"none", "cores"});
  schema.field("oversubscribe", &Typed::oversubscribe, "Allow more than 32 workers per usable CPU");

  schema.group("Nodes", kAboutRun);
  torchruns("nnodes", &Typed::nnodes_text, "N|MIN:MAX",
            "Number of machines, or of launchers; with c10d a range, within which "
            "they may come and go: all workers then begin again",
            kMostUsed | kExcludesHosts);
  torchruns("node_rank", &Typed::node_rank, "N", "This machine's number, from 0; with --nnodes",
            kExcludesHosts)
      .between(0, 65535)
      .shown_default("");
  torchruns("master_addr", &Typed::master_addr, "HOST",
            "Host name or address of node 0; on one machine 127.0.0.1", kKeptByHead);
  torchruns("master_port", &Typed::master_port, "PORT",
            "TCP port on node 0 for the workers' store; with one machine a free one is chosen, "
            "else 29500 (c10d: 29400); 0 asks for a free one",
            kKeptByHead)
      .between(0, 65535);
  torchruns("standalone", &Typed::standalone, "", "One machine, apart from all other jobs on it",
            kMostUsed | kExcludesHosts);
  torchruns("rdzv_backend", &Typed::rdzv_backend, "",
            "static: node 0 leads, at --master_addr; c10d: the host of "
            "--rdzv_endpoint leads, and nodes need no --node_rank",
            kExcludesHosts)
      .one_of({"static", "c10d"});
  torchruns("rdzv_endpoint", &Typed::rdzv_endpoint, "ADDRESS",
            "HOST:PORT where nodes meet; with static in place of --master_addr and --master_port",
            kMayBeEmpty | kExcludesHosts);
  torchruns("rdzv_id", &Typed::run_id, "ID", "Name of the job, the same on all nodes", kMayBeEmpty);
  torchruns("rdzv_conf", &Typed::rdzv_conf, "K=V,...",
            "Times: join_timeout for all nodes to arrive (600), last_call_timeout for more than "
            "MIN (30), keep_alive_interval (5); keep_alive_max_attempt (3) until a silent node is "
            "lost; is_host; store_mib, the store's memory (64, and 1 for 4 workers); others of "
            "torchrun's settings are accepted",
            kMayBeEmpty);
  ours("token_file", &Typed::token_file, "FILE",
       "A secret of at least 16 bytes, the same on all nodes: launchers without it are refused. Or "
       "the variable SYNCBN_TOKEN; over ssh the launcher makes one itself",
       kKeptByHead | kNotForCheck)
      .shown_default("");
  ours("listen", &Typed::listen, "ADDRESS",
       "Address or network interface at which node 0 listens; all, unless "
       "--master_addr is a loopback address");
  torchruns("local_addr", &Typed::local_addr, "HOST",
            "Name of this machine in messages to the other nodes", kMayBeEmpty | kExcludesHosts);

  schema.group("Nodes over ssh", kNeedsHosts);
  ours("hosts", &Typed::hosts, "HOSTS",
       "Start workers on these machines, from here: a:4,user@b:4; "
       "without a number as many as --nproc_per_node says there",
       kMostUsed)
      .letter("-H");
  ours("hostfile", &Typed::hostfile, "FILE",
       "Read the hosts from a file, one per line: HOST, HOST:N or HOST slots=N");
  ours("export", &Typed::exports, "NAMES",
       "Variables that the workers on other hosts get besides those in "
       "docs/ssh.md: NAME,PREFIX_*; !NAME leaves one out");
  ours("ssh_port", &Typed::ssh_port, "PORT", "Where sshd listens").between(1, 65535);
  ours("ssh_user", &Typed::ssh_user, "NAME", "Log in as this user");
  ours("ssh_identity", &Typed::ssh_identity, "FILE", "Log in with this private key");
  ours("ssh_options", &Typed::ssh_options, "WORDS",
       "More options for ssh, in one word: '-o ProxyJump=gate'");
  ours("ssh_command", &Typed::ssh_command, "WORDS", "What to run in place of ssh");
  ours("ssh_launcher", &Typed::ssh_launcher, "PATH",
       "syncbn-launch on the other hosts; where it is here unless given");
  ours("ssh_timeout", &Typed::ssh_timeout_text, "TIME",
       "Time for all hosts to say that they are ready");

  schema.group("Failures and ending", kAboutRun);
  torchruns("max_restarts", &Typed::max_restarts_text, "N|N/TIME",
            "Start all workers again, up to N times, when one has failed; 5/1h: up to 5 times "
            "within any hour. Exit code 2, a usage error, ends the run at once, as does a rank "
            "that fails three times in a row in the same way at the same step",
            kMostUsed | kNotForCheck);
  ours("exclude_failing", &Typed::exclude_failing, "N",
       "Go on without a node whose workers have failed N times, or which "
       "was lost so often, while --nnodes=MIN:MAX leaves MIN; 0: never",
       kNotForCheck)
      .between(0, 1000000);
  torchruns("signals_to_handle", &Typed::signals_to_handle, "NAMES",
            "Signals that end the workers, and then the launcher; SIGUSR1 "
            "and SIGUSR2 always pass through to the workers",
            kMayBeEmpty);
  ours("shutdown_timeout", &Typed::shutdown_text, "TIME",
       "Time that workers have to end after a signal, before they are "
       "killed; and time that processes they started have to end once "
       "all workers have succeeded. Seconds, or 500ms, 30s, 5m, 2h, 1d");
  ours("hang_timeout", &Typed::hang_text, "TIME",
       "End the rank that holds up the others when a worker that reports its steps (train does) "
       "has made none for so long, or waits so long in a collective; 0: never. Without it, as the "
       "program asks: train asks for 10 minutes, or more if its steps are long",
       kNotForCheck);
  ours("straggler_interval", &Typed::straggler_text, "TIME",
       "How often to compare how long the ranks take between collectives: one that takes 1.3 times "
       "the median's time in three intervals in a row is named once; 0: never");

  ours("preflight", &Typed::preflight, "",
       "Measure all nodes, their GPUs and the network first, name outliers, "
       "and end with code 75 if the job would fail",
       kKeptByHead | kNotForCheck);

  schema.group("Program", kNotForCheck);
  torchruns("module", &Typed::module, "", "The program is a Python module, as in python -m")
      .letter("-m");
  torchruns("no_python", &Typed::no_python, "", "Run NAME.py as it is, without Python before it");
  torchruns("run_path", &Typed::run_path, "", "Run the Python script NAME through runpy.run_path");
  ours("stdin", &Typed::stdin_text, "RANK|none",
       "The worker that reads the launcher's input; the others find its end at once");
  schema.field("use_env", &Typed::use_env, "Tell the local rank by LOCAL_RANK only; the default");
  schema.field(
      "no_use_env", &Typed::no_use_env,
      "Tell the local rank also by an argument, as python -m torch.distributed.launch does");
  schema.field("local_rank_arg", &Typed::rank_argument, "That argument's name; =RANK is appended")
      .value_name("NAME");
  schema.field("dry_run", &Typed::dry_run, "Print what would be started, and start nothing")
      .tags(kMostUsed | kKeptByHead);

  schema.group("Output", kNotForCheck);
  ours("prefix", &Typed::prefix_text, "on|off|TEXT",
       "What stands before each line of several workers; TEXT may hold "
       "${host}, ${rank}, ${local_rank}, ${role_name}, ${time}")
      .shown_default("on, \"[${host}:${rank}] \"")
      .environment({"SYNCBN_PREFIX", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"});
  torchruns("log_dir", &Typed::log_dir, "FOLDER",
            "Where log files go; a folder is made in it for each run: "
            "ID_xxxxxx/attempt_0/LOCAL_RANK/stdout.log, stderr.log, error.json",
            kMayBeEmpty | kMostUsed);
  torchruns("redirects", &Typed::redirects_text, "STREAMS",
            "Streams that go to log files instead of here: 1 stdout, "
            "2 stderr, 3 both, or for some local ranks: 0:3,1:2")
      .letter("-r");
  torchruns("tee", &Typed::tee_text, "STREAMS", "Streams that go to log files as well as here")
      .letter("-t");
  torchruns("local_ranks_filter", &Typed::local_ranks_filter_text, "RANKS",
            "Show the output of these local ranks only: 0,1", kMayBeEmpty);
  torchruns("duplicate_stdout_filters", &Typed::stdout_filters_text, "TEXTS",
            "Copy lines with one of these texts to filtered_stdout.log: a,b", kMayBeEmpty);
  torchruns("duplicate_stderr_filters", &Typed::stderr_filters_text, "TEXTS",
            "Copy lines of stderr with one of these texts to filtered_stderr.log", kMayBeEmpty);
  ours("report", &Typed::report, "FILE",
       "Write how the run ended, and the first failure, to this file as JSON", kKeptByHead);
  torchruns("event_log_handler", &Typed::event_log_handler, "null|console|json|json:FILE",
            "Write each start, end, failure and restart as a line of JSON: to stderr, to "
            "events.jsonl in the log folder, or to the end of a file; every node has its own");

  schema.group("Accepted for torchrun's sake, without effect", kTorchruns);
  schema.field("monitor_interval", &Typed::without_effect, "Failures are seen at once")
      .value_name("SECONDS");
  schema.field("start_method", &Typed::without_effect, "Workers are programs")
      .value_name("spawn|fork|forkserver");
  schema.field("logs_specs", &Typed::without_effect, "Others are Python plug-ins of torchrun's")
      .one_of({"default"});

  schema.group("About");
  schema
      .field("help", &Typed::help,
             "Show the most used options; the words nodes, all and others after it show more")
      .letter("-h")
      .tags(kTorchruns);
  schema.field("version", &Typed::version, "Show the version").letter("-V");
  schema
      .field("completion", &Typed::completion,
             "Print a script that completes this command line in a shell")
      .one_of({"bash", "zsh"});
}

const std::vector<config::FieldInfo>& option_fields() {
  static const std::vector<config::FieldInfo> kFields = [] {
    std::vector<config::FieldInfo> fields;
    config::Schema<TypedOptions>::get().info("", fields);
    for (config::FieldInfo& field : fields) {
      if (field.is_switch() || field.type.ends_with("or null")) field.default_value.clear();
      if (field.choices.empty()) continue;
      field.value_name = base::join(field.choices, "|");
      field.range.clear();  // the name shows it
    }
    return fields;
  }();
  return kFields;
}

unsigned tags_of(const std::string& word) {
  const std::string name = word.substr(2, word.find('=') - 2);
  return std::ranges::find(option_fields(), name, &config::FieldInfo::path)->tags;
}

void throw_if_removed(const std::string& name) {
  constexpr const char* kHosts = "name only the hosts to use in --hosts or --hostfile";
  static const std::map<std::string, const char*> kReplacements{
      {"include", kHosts},
      {"exclude", kHosts},
      {"man", "read --help all or, where syncbn-launch is installed, `man syncbn-launch`"},
      {"ssh_all", "write USER@HOST in --hosts or --hostfile to use ssh for this machine"},
      {"tls",
       "a private network or WireGuard encrypts all of a job's messages; unset SYNCBN_TLS as well"},
  };
  const auto removed = kReplacements.find(name);
  if (removed == kReplacements.end()) return;
  throw base::UserError(fmt::format("--{} has been removed: {}", name, removed->second));
}

}  // namespace syncbn::launch

#include "options/option_table.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>

namespace syncbn::launch {
namespace {

auto one_of(std::vector<std::string> choices) {
  return [choices = std::move(choices)](const std::string& typed) -> std::string {
    if (std::find(choices.begin(), choices.end(), typed) != choices.end()) return "";
    return fmt::format("expected one of {}, got '{}'{}", base::join(choices, ", "), typed,
                       base::did_you_mean(typed, choices));
  };
}

/// Adds options to one group of the help after the other.
class Table {
 public:
  Table(CLI::App& app, std::vector<OptionSource>& sources) : app_(app), sources_(sources) {}

  void group(const std::string& name) { group_ = name; }

  /// `names` as in CLI11, the long one last; its environment variable is PET_<NAME>.
  template <class T>
  CLI::Option* value(const std::string& names, T& into, const std::string& type,
                     const std::string& help) {
    CLI::Option* option = app_.add_option(names, into, help)->type_name(type);
    // As argparse: the last one counts.
    return added(names, option->take_last(), false);
  }
  /// A decimal number from min to max. CLI11 would read 010 as eight, and let nan through.
  template <class Number>
  CLI::Option* number(const std::string& names, Number& into, Number min, Number max,
                      const std::string& type, const std::string& help) {
    const std::string name = long_name(names);
    const auto read = [name, &into, min, max](const std::string& typed) {
      into = base::parse_number<Number>(typed).value_or(min - 1);
      if (into >= min && into <= max) return;
      throw CLI::ValidationError(
          name, fmt::format("expected a number from {} to {}, got '{}'", min, max, typed));
    };
    CLI::Option* option = app_.add_option_function<std::string>(names, read, help);
    return added(names, option->type_name(type)->take_last(), false);
  }
  CLI::Option* flag(const std::string& names, bool& into, const std::string& help) {
    return added(names, app_.add_flag(names, into, help), true);
  }
  /// The variables that stand for the option that was added last.
  void environment(std::vector<std::string> names) {
    sources_.back().environment = std::move(names);
  }
  /// The option that was added last is not torchrun's; these variables stand for it.
  void ours(std::vector<std::string> environment = {}) {
    sources_.back().is_torchruns = false;
    sources_.back().environment = std::move(environment);
  }
  /// The same for one that the launchers on other hosts are not told.
  void heads(std::vector<std::string> environment = {}) {
    ours(std::move(environment));
    sources_.back().is_heads = true;
  }
  /// torchrun has it, and nothing here depends on it.
  CLI::Option* accepted(const std::string& names, const std::string& type,
                        const std::string& help) {
    const auto ignore = [](const std::string&) {};
    CLI::Option* option = app_.add_option_function<std::string>(names, ignore, help);
    sources_.push_back({.name = long_name(names), .environment = {}});
    return option->type_name(type)->take_last()->group(group_);
  }

 private:
  static std::string long_name(const std::string& names) { return names.substr(names.find("--")); }

  CLI::Option* added(const std::string& names, CLI::Option* option, bool is_flag) {
    const std::string name = long_name(names);
    std::string variable = "PET_" + name.substr(2);
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](unsigned char c) { return std::toupper(c); });
    sources_.push_back({.name = name, .environment = {variable}, .is_flag = is_flag});
    return option->group(group_);
  }

  CLI::App& app_;
  std::vector<OptionSource>& sources_;
  std::string group_;
};

void describe_workers(Table& table, TypedOptions& typed) {
  table.group("Workers");
  table
      .value("--nproc_per_node", typed.nproc_per_node, "N|cpu|gpu|auto",
             "Workers on this machine: a number, cpu (one per core),\n"
             "gpu (one per GPU), auto (gpu where there is one, else cpu)")
      ->default_str("1");
  table.environment({"PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE"});
  table.value("--role", typed.options.role, "NAME", "What the workers find as ROLE_NAME")
      ->default_str("default");
  table.flag("--virtual_local_rank", typed.options.virtual_local_rank,
             "Each worker has LOCAL_RANK=0 and sees its GPU as the only one");
  table
      .value("--numa_binding", typed.numa_binding, "node|socket|exclusive",
             "Bind each worker to the cores near its GPU (without GPUs, spread\n"
             "evenly): of the NUMA node, of its socket, or to a share of the node's")
      ->check(one_of({"node", "socket", "exclusive"}));
  table
      .value("--bind", typed.bind, "none|cores",
             "cores: bind each worker to its own share of this machine's cores")
      ->check(one_of({"none", "cores"}))
      ->default_str("none");
  table.ours({"SYNCBN_BIND"});
  table.flag("--oversubscribe", typed.options.oversubscribe,
             "Allow more than 32 workers per usable core");
  table.ours();
}

void describe_nodes(Table& table, TypedOptions& typed) {
  table.group("Nodes");
  table
      .value("--nnodes", typed.nnodes, "N|MIN:MAX",
             "Number of machines, or of launchers; with c10d a range, within which\n"
             "they may come and go: all workers then begin again")
      ->default_str("1");
  table.number("--node_rank", typed.options.node_rank, 0, 65535, "N",
               "This machine's number, from 0; with --nnodes");
  table.value("--master_addr", typed.options.master_addr, "HOST",
              "Host name or address of node 0; on one machine 127.0.0.1");
  table.number("--master_port", typed.master_port, 0, 65535, "PORT",
               "TCP port on node 0 for the workers' store; with one machine a\n"
               "free one is chosen, else 29500 (c10d: 29400); 0 asks for a free\n"
               "one");
  table.flag("--standalone", typed.options.standalone,
             "One machine, apart from all other jobs on it");
  table
      .value("--rdzv_backend", typed.rdzv_backend, "static|c10d",
             "static: node 0 leads, at --master_addr; c10d: the host of\n--rdzv_endpoint leads, "
             "and nodes need no --node_rank")
      ->check(one_of({"static", "c10d"}))
      ->default_str("static");
  table.value(
      "--rdzv_endpoint", typed.rdzv_endpoint, "ADDRESS",
      "HOST:PORT where nodes meet; with static in place of --master_addr and\n--master_port");
  table.value("--rdzv_id", typed.options.run_id, "ID", "Name of the job, the same on all nodes")
      ->default_str("none");
  table.value("--rdzv_conf", typed.rdzv_conf, "K=V,...",
              "Whole seconds: join_timeout for all nodes to come (600),\n"
              "last_call_timeout for more than MIN (30), keep_alive_interval (5);\n"
              "keep_alive_max_attempt (3) until a silent node is lost; is_host;\n"
              "others of torchrun's settings are accepted");
  table.value("--local_addr", typed.options.local_addr, "HOST",
              "Name of this machine in messages to the other nodes");
}

void describe_hosts(Table& table, TypedOptions& typed) {
  table.group("Nodes over ssh");
  table.value("-H,--hosts", typed.hosts, "HOSTS",
              "Start workers on these machines, from here: a:4,user@b:4;\n"
              "without a number as many as --nproc_per_node says there");
  table.heads({"SYNCBN_HOSTS"});
  table.value("--hostfile", typed.hostfile, "FILE",
              "The same from a file: HOST, HOST:N or HOST slots=N a line");
  table.heads({"SYNCBN_HOSTFILE"});
  table.value("--include", typed.include, "HOSTS", "Of the hosts take only these");
  table.heads();
  table.value("--exclude", typed.exclude, "HOSTS", "Of the hosts leave these out");
  table.heads();
  table.value("--export", typed.exports, "NAMES",
              "Variables that the workers on other hosts get besides those in\n"
              "docs/ssh.md: NAME,PREFIX_*; !NAME leaves one out");
  table.heads({"SYNCBN_EXPORT"});
  table.number("--ssh_port", typed.ssh_port, 1, 65535, "PORT", "Where sshd listens");
  table.heads({"SYNCBN_SSH_PORT"});
  table.value("--ssh_user", typed.ssh_user, "NAME", "Log in as this user");
  table.heads({"SYNCBN_SSH_USER"});
  table.value("--ssh_identity", typed.ssh_identity, "FILE", "Log in with this private key");
  table.heads({"SYNCBN_SSH_IDENTITY"});
  table.value("--ssh_options", typed.ssh_options, "WORDS",
              "More options for ssh, in one word: '-o ProxyJump=gate'");
  table.heads({"SYNCBN_SSH_OPTIONS"});
  table.value("--ssh_command", typed.ssh_command, "WORDS", "What to run in place of ssh")
      ->default_str(typed.ssh_command);
  table.heads({"SYNCBN_SSH_COMMAND"});
  table.value("--ssh_launcher", typed.options.head.launcher, "PATH",
              "syncbn-launch on the other hosts; where it is here unless given");
  table.heads({"SYNCBN_SSH_LAUNCHER"});
  table
      .number("--ssh_timeout", typed.ssh_timeout, 0.1, 86400.0, "SECONDS",
              "Time for all hosts to say that they are ready")
      ->default_str("20");
  table.heads({"SYNCBN_SSH_TIMEOUT"});
  table.flag(
      "--ssh_all", typed.options.head.ssh_all,
      "Reach this machine, too, by ssh; else a host that is this machine\nis started directly");
  table.heads();
}

void describe_failures(Table& table, TypedOptions& typed) {
  table.group("Failures and ending");
  table
      .number("--max_restarts", typed.options.max_restarts, 0, 1'000'000, "N",
              "Start all workers again, up to N times, when one has failed;\n"
              "exit code 2, a usage error, ends the run at once")
      ->default_str("0");
  table
      .value("--signals_to_handle", typed.signals, "NAMES",
             "Signals that end the workers, and then the launcher; SIGUSR1\n"
             "and SIGUSR2 always pass through to the workers")
      ->default_str(typed.signals);
  table
      .number("--shutdown_timeout", typed.shutdown_timeout, 0.0, 86400.0, "SECONDS",
              "Time that workers have to end after a signal, before they are\n"
              "killed; and time that processes they started have to end once\n"
              "all workers have succeeded")
      ->default_str("30");
  table.ours({"SYNCBN_SHUTDOWN_TIMEOUT"});
}

void describe_program(Table& table, TypedOptions& typed) {
  table.group("Program");
  table.flag("-m,--module", typed.options.module,
             "The program is a Python module, as in python -m");
  table.flag("--no_python", typed.options.no_python,
             "Run NAME.py as it is, without Python before it");
  table.flag("--run_path", typed.options.run_path,
             "Run the Python script NAME through runpy.run_path");
  table
      .value("--stdin", typed.stdin_rank, "RANK|none",
             "The worker that reads the launcher's input; the others find\nits end at once")
      ->default_str(typed.stdin_rank);
  table.ours({"SYNCBN_STDIN"});
  table.flag("--use_env", typed.use_env, "Tell the local rank by LOCAL_RANK only; the default");
  table.ours();
  table.flag(
      "--no_use_env", typed.no_use_env,
      "Tell the local rank by an argument, too, as\npython -m torch.distributed.launch does");
  table.ours();
  table
      .value("--local_rank_arg", typed.local_rank_arg, "NAME",
             "That argument's name; =RANK is appended")
      ->default_str(typed.local_rank_arg);
  table.ours();
  table.flag("--dry_run", typed.options.dry_run, "Print what would be started, and start nothing");
  table.ours();
}

void describe_output(Table& table, TypedOptions& typed) {
  table.group("Output");
  table
      .value("--prefix", typed.prefix, "on|off|TEXT",
             "What stands before each line of several workers; TEXT may hold\n"
             "${host}, ${rank}, ${local_rank}, ${role_name}, ${time}")
      ->default_str("on, \"[${host}:${rank}] \"");
  table.ours({"SYNCBN_PREFIX", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"});
  table.value("--log_dir", typed.options.log_dir, "FOLDER",
              "Where log files go; a folder is made in it for each run:\n"
              "ID_xxxxxx/attempt_0/LOCAL_RANK/stdout.log, stderr.log, error.json");
  table
      .value("-r,--redirects", typed.redirects, "STREAMS",
             "Streams that go to log files instead of here: 1 stdout,\n"
             "2 stderr, 3 both, or for some local ranks: 0:3,1:2")
      ->default_str("0");
  table.value("-t,--tee", typed.tee, "STREAMS", "Streams that go to log files as well as here")
      ->default_str("0");
  table.value("--local_ranks_filter", typed.local_ranks_filter, "RANKS",
              "Show the output of these local ranks only: 0,1");
  table.value("--duplicate_stdout_filters", typed.duplicate_stdout_filters, "TEXTS",
              "Copy lines with one of these texts to filtered_stdout.log: a,b");
  table.value("--duplicate_stderr_filters", typed.duplicate_stderr_filters, "TEXTS",
              "The same for stderr and filtered_stderr.log");
}

void describe_report(Table& table, TypedOptions& typed) {
  table.value("--report", typed.options.report, "FILE",
              "Write how the run ended, and the first failure, to this file as\nJSON");
  table.ours({"SYNCBN_REPORT"});
  table
      .value("--event_log_handler", typed.event_log_handler, "null|console|json|json:FILE",
             "Write each start, end, failure and restart as a line of JSON:\n"
             "to stderr, to events.jsonl in the log folder, or to the end of a\n"
             "file; every node has its own")
      ->default_str("null");
}

void describe_accepted(Table& table) {
  table.group("Accepted for torchrun's sake, without effect");
  table.accepted("--monitor_interval", "SECONDS", "Failures are seen at once");
  table.accepted("--start_method", "spawn|fork|forkserver", "Workers are programs");
  table.accepted("--logs_specs", "default", "Others are Python plug-ins of torchrun's")
      ->check(one_of({"default"}));
}

void describe_about(Table& table, TypedOptions& typed) {
  table.group("About");
  table
      .value("--completion", typed.completion, "bash|zsh",
             "Print a script that completes this command line in a shell")
      ->check(one_of({"bash", "zsh"}));
  table.ours();
  table.flag("--man", typed.man_page, "Print the manual page, for man -l");
  table.ours();
}

}  // namespace

std::vector<OptionSource> describe_options(CLI::App& app, TypedOptions& typed) {
  std::vector<OptionSource> sources;
  Table table(app, sources);
  describe_workers(table, typed);
  describe_nodes(table, typed);
  describe_hosts(table, typed);
  describe_failures(table, typed);
  describe_program(table, typed);
  describe_output(table, typed);
  describe_report(table, typed);
  describe_accepted(table);
  app.set_help_flag("-h,--help", "Show this text")->group("About");
  app.set_version_flag("-V,--version", "syncbn-launch " SYNCBN_VERSION, "Show the version")
      ->group("About");
  sources.push_back({.name = "--help", .environment = {}, .is_flag = true});
  sources.push_back(
      {.name = "--version", .environment = {}, .is_flag = true, .is_torchruns = false});
  describe_about(table, typed);
  return sources;
}

}  // namespace syncbn::launch

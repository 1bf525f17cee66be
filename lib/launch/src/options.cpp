#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>

#include "command_line.h"
#include "completion.h"
#include "devices.h"
#include "head_options.h"
#include "hosts.h"
#include "man_page.h"
#include "option_table.h"
#include "scheduler.h"
#include "words.h"

namespace syncbn::launch {
namespace {

int count_workers(const std::string& typed, bool virtual_local_rank) {
  if (typed == "cpu") return count_cores();
  if (typed == "auto" || typed == "gpu") {
    const int gpus = count_gpus(virtual_local_rank);
    if (gpus > 0) return gpus;
    if (typed == "auto") return count_cores();
    throw base::UserError(
        "--nproc_per_node=gpu: no GPU is visible (CUDA_VISIBLE_DEVICES, /proc/driver/nvidia, "
        "NVML); use a number, or cpu");
  }
  const auto count = whole_number(typed);
  if (!count || *count < 1 || *count > kMostWorkers) {
    throw base::UserError(
        fmt::format("--nproc_per_node={}: expected a number from 1 to {}, or auto, cpu, gpu", typed,
                    kMostWorkers));
  }
  return *count;
}

Binding read_binding(const TypedOptions& typed) {
  const bool cores = typed.bind == "cores";
  if (cores && !typed.numa_binding.empty()) {
    throw base::UserError(fmt::format(
        "--bind=cores and --numa_binding={} exclude each other; --numa_binding=exclusive gives "
        "each worker its own cores near its GPU",
        typed.numa_binding));
  }
  if (typed.numa_binding == "node") return Binding::kNode;
  if (typed.numa_binding == "socket") return Binding::kSocket;
  if (typed.numa_binding == "exclusive") return Binding::kExclusive;
  if (typed.numa_binding == "core-complex") return Binding::kCoreComplex;
  return cores ? Binding::kCores : Binding::kNone;
}

NodeRange read_nodes(const std::string& typed) {
  constexpr int kMost = 65536;
  const size_t colon = typed.find(':');
  const auto min = whole_number(std::string_view(typed).substr(0, colon));
  const auto max =
      colon == std::string::npos ? min : whole_number(std::string_view(typed).substr(colon + 1));
  if (!min || !max || *min < 1 || *max < *min || *max > kMost) {
    throw base::UserError(fmt::format(
        "--nnodes={}: expected a number from 1 to {}, or a range as 2:4", typed, kMost));
  }
  return {*min, *max};
}

std::vector<int> read_signals(const std::string& typed) {
  std::vector<int> signals;
  for (std::string name : words_of(typed)) {
    name.erase(0, name.find_first_not_of(' '));
    name.erase(name.find_last_not_of(' ') + 1);
    int signal = 0;
    // What a terminal, a scheduler or a person sends to end a program.
    for (const int known : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
      if (name == std::string("SIG") + ::sigabbrev_np(known)) signal = known;
    }
    const bool passes = name == "SIGUSR1" || name == "SIGUSR2";
    if (signal != 0) signals.push_back(signal);
    if (signal != 0 || passes) continue;
    throw base::UserError(fmt::format(
        "--signals_to_handle={}: '{}' is not one of SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, "
        "SIGUSR2",
        typed, name));
  }
  return signals;
}

std::optional<Streams> read_streams(std::string_view number) {
  if (number.size() != 1 || number[0] < '0' || number[0] > '3') return std::nullopt;
  const int bits = number[0] - '0';
  return Streams{.out = (bits & 1) != 0, .err = (bits & 2) != 0};
}

StreamChoice read_stream_choice(const std::string& option, const std::string& typed, int nproc) {
  StreamChoice choice;
  if (const auto all = read_streams(typed)) {
    choice.all = *all;
    return choice;
  }
  for (const std::string& word : words_of(typed)) {
    const size_t colon = std::min(word.find(':'), word.size());
    const auto local_rank = whole_number(std::string_view(word).substr(0, colon));
    const auto streams =
        read_streams(std::string_view(word).substr(std::min(colon + 1, word.size())));
    if (!local_rank || !streams || *local_rank < 0) {
      throw base::UserError(
          fmt::format("{}={}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or some for "
                      "each local rank, as 0:3,1:2",
                      option, typed));
    }
    if (*local_rank >= nproc) {
      throw base::UserError(fmt::format("{}={}: local rank {} is not below --nproc_per_node={}",
                                        option, typed, *local_rank, nproc));
    }
    choice.by_local_rank[*local_rank] = *streams;
  }
  return choice;
}

std::vector<int> read_local_ranks(const std::string& typed, int nproc) {
  std::vector<int> ranks;
  for (const std::string& word : words_of(typed)) {
    const auto rank = whole_number(word);
    if (!rank || *rank < 0 || *rank >= nproc) {
      throw base::UserError(
          fmt::format("--local_ranks_filter={}: expected local ranks from 0 to {} with commas "
                      "between, got '{}'",
                      typed, nproc - 1, word));
    }
    ranks.push_back(*rank);
  }
  return ranks;
}

// As torchrun splits them: ",," is a comma in a text.
std::vector<std::string> read_filters(const std::string& typed) {
  std::vector<std::string> texts;
  std::string text;
  for (size_t i = 0; i < typed.size(); ++i) {
    if (typed[i] != ',') {
      text += typed[i];
    } else if (i + 1 < typed.size() && typed[i + 1] == ',') {
      text += typed[i++];
    } else {
      if (!text.empty()) texts.push_back(text);
      text.clear();
    }
  }
  if (!text.empty()) texts.push_back(text);
  return texts;
}

void read_event_log(const std::string& typed, LaunchOptions& options) {
  constexpr std::string_view kFile = "json:";
  if (typed == "console") {
    options.events = EventTarget::kConsole;
  } else if (typed == "json") {
    options.events = EventTarget::kLogFolder;
  } else if (typed.starts_with(kFile) && typed.size() > kFile.size()) {
    options.events = EventTarget::kFile;
    options.events_file = typed.substr(kFile.size());
  } else if (typed != "null") {
    throw base::UserError(fmt::format(
        "--event_log_handler={}: expected null, console, json or json:FILE{} (torchrun's "
        "registered handlers are Python, which this launcher does not load)",
        typed, base::did_you_mean(typed, {"null", "console", "json"})));
  }
}

void read_endpoint(const std::string& endpoint, LaunchOptions& options) {
  const auto parsed = base::parse_host_port(endpoint);
  if (!parsed) {
    throw base::UserError(
        fmt::format("--rdzv_endpoint={}: expected HOST:PORT, or HOST alone", endpoint));
  }
  options.master_addr = parsed->host;
  if (parsed->port) options.master_port = *parsed->port;
}

// torchrun's names; what it offers beyond these is about its own store.
void read_rendezvous_settings(const std::string& typed, LaunchOptions& options) {
  for (const std::string& word : words_of(typed)) {
    if (word.empty()) continue;  // torchrun, too, takes a comma too many here
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (equals == std::string::npos) {
      throw base::UserError(fmt::format(
          "--rdzv_conf={}: expected NAME=VALUE with commas between, got '{}'", typed, word));
    }
    const std::string value = word.substr(equals + 1);
    const auto number = [&](int least) {
      const auto read = whole_number(value);
      if (read && *read >= least) return *read;
      throw base::UserError(fmt::format("--rdzv_conf={}: {} is a whole number from {}, got '{}'",
                                        typed, name, least, value));
    };
    if (name == "join_timeout" || name == "timeout") {
      options.join_timeout = std::chrono::seconds(number(1));
    } else if (name == "last_call_timeout") {
      options.last_call = std::chrono::seconds(number(0));
    } else if (name == "keep_alive_interval") {
      options.alive_period = std::chrono::seconds(number(1));
    } else if (name == "keep_alive_max_attempt") {
      options.alive_misses = number(1);
    } else if (name == "is_host") {
      options.is_host = read_flag(value);
      if (!options.is_host) {
        throw base::UserError(
            fmt::format("--rdzv_conf={}: is_host is true or false, got '{}'", typed, value));
      }
    }
  }
}

/// What was not given is taken from SLURM, Open MPI or Kubernetes.
void ask_scheduler(const CommandLine& line, LaunchOptions& options) {
  if (options.standalone || options.c10d) return;
  const bool says_nodes = line.has("--nnodes");
  // A pod's launcher may run on its own, too.
  if (says_nodes && options.nnodes.max > 1 && !line.has("--node_rank")) {
    if (const auto index = kubernetes_index()) options.node_rank = *index;
  }
  if (line.has("--node_rank") || (says_nodes && options.nnodes.max == 1)) return;
  const auto place = place_from_scheduler();
  if (!place || (says_nodes && options.nnodes.max != place->nodes)) return;
  if (!says_nodes) options.nnodes = {place->nodes, place->nodes};
  options.node_rank = place->node_rank;
  options.scheduler = place->source;
  if (options.master_addr.empty()) options.master_addr = place->master_addr;
  if (!options.master_port && place->master_port != 0) options.master_port = place->master_port;
  if (!line.has("--rdzv_id") && !place->run_id.empty()) options.run_id = place->run_id;
}

void check_nodes(const CommandLine& line, const LaunchOptions& options) {
  const int nnodes = options.nnodes.max;
  if (options.standalone && nnodes > 1) {
    throw base::UserError(fmt::format(
        "--standalone is for one machine, and --nnodes={} asks for more; leave one of them out",
        nnodes));
  }
  if (options.nnodes.min != nnodes && !options.c10d) {
    throw base::UserError(
        fmt::format("--nnodes={}:{}, a range, needs --rdzv_backend=c10d and --rdzv_endpoint: with "
                    "the static backend all nodes are known from the start",
                    options.nnodes.min, nnodes));
  }
  if (options.node_rank >= nnodes) {
    throw base::UserError(
        fmt::format("{}={} is not below --nnodes={}", "--node_rank", options.node_rank, nnodes));
  }
  if (nnodes == 1) return;
  const bool has_rank =
      line.has("--node_rank") || !options.scheduler.empty() || kubernetes_index().has_value();
  if (!has_rank && !options.c10d) {
    throw base::UserError(fmt::format(
        "--nnodes={0} needs --node_rank, this machine's number from 0 to {1}", nnodes, nnodes - 1));
  }
  if (options.master_addr.empty()) {
    const std::string who =
        options.scheduler.empty()
            ? fmt::format("--nnodes={}", nnodes)
            : fmt::format("{}, which starts {} launchers,", options.scheduler, nnodes);
    throw base::UserError(fmt::format("{} needs {}, the name or address of node 0", who,
                                      options.c10d ? "--rdzv_endpoint" : "--master_addr"));
  }
  if (options.master_port == 0) {
    throw base::UserError(
        "--master_port=0 (any free port) is for one machine: others cannot know it");
  }
}

void check_program(const TypedOptions& typed) {
  const LaunchOptions& options = typed.options;
  if (options.module && options.no_python) {
    throw base::UserError(
        "--module runs Python, and --no_python forbids it; leave one of them out");
  }
  if (typed.use_env && typed.no_use_env) {
    throw base::UserError("--use_env and --no_use_env exclude each other");
  }
}

/// `python -m torch.distributed.launch` told the local rank by an argument, too.
bool tells_local_rank(const TypedOptions& typed, const CommandLine& line, std::string_view name) {
  const bool is_old_launcher = name.substr(name.rfind('/') + 1) == "torch.distributed.launch";
  const bool use_env = line.has("--use_env") ? typed.use_env : !is_old_launcher;
  return typed.no_use_env || !use_env;
}

void read_ending(const TypedOptions& typed, LaunchOptions& options) {
  options.signals_to_handle = typed.signals;
  options.ending_signals = read_signals(typed.signals);
  options.shutdown_timeout =
      std::chrono::milliseconds(static_cast<int64_t>(typed.shutdown_timeout * 1000));
}

void read_master_addr(LaunchOptions& options) {
  // An IPv6 address may stand in brackets.
  const auto master = base::parse_host_port(options.master_addr);
  if (master && !master->port) options.master_addr = master->host;
}

LaunchOptions read(TypedOptions& typed, const CommandLine& line, std::string_view launcher_name) {
  LaunchOptions options = typed.options;
  options.nproc_per_node = count_workers(typed.nproc_per_node, options.virtual_local_rank);
  options.binding = read_binding(typed);
  options.nnodes = read_nodes(typed.nnodes);
  read_ending(typed, options);
  options.redirects = read_stream_choice("--redirects", typed.redirects, options.nproc_per_node);
  options.tee = read_stream_choice("--tee", typed.tee, options.nproc_per_node);
  options.local_ranks_filter = read_local_ranks(typed.local_ranks_filter, options.nproc_per_node);
  options.duplicate_stdout_filters = read_filters(typed.duplicate_stdout_filters);
  options.duplicate_stderr_filters = read_filters(typed.duplicate_stderr_filters);
  options.prefix = typed.prefix;
  if (typed.prefix == "on") options.prefix = kDefaultPrefix;
  if (typed.prefix == "off") options.prefix.clear();
  read_event_log(typed.event_log_handler, options);
  options.given = line.options();
  options.c10d = typed.rdzv_backend == "c10d";
  if (options.c10d && !line.has("--node_rank")) options.node_rank = options.nnodes.max > 1 ? -1 : 0;
  read_rendezvous_settings(typed.rdzv_conf, options);
  if (line.has("--master_port")) options.master_port = typed.master_port;
  read_master_addr(options);
  if (!typed.rdzv_endpoint.empty()) read_endpoint(typed.rdzv_endpoint, options);
  // torchrun, too, lets --standalone overrule them.
  if (options.standalone) {
    options.master_addr.clear();
    options.master_port.reset();
  }
  ask_scheduler(line, options);
  if (tells_local_rank(typed, line, launcher_name)) options.local_rank_arg = typed.local_rank_arg;
  return options;
}

/// What concerns the head; the nodes read, and check, the rest.
LaunchOptions read_for_head(const TypedOptions& typed, const CommandLine& line,
                            const std::vector<OptionSource>& sources,
                            std::string_view launcher_name) {
  LaunchOptions options = typed.options;
  read_ending(typed, options);
  read_rendezvous_settings(typed.rdzv_conf, options);
  // In the environment they are of a scheduler that knows nothing of the hosts.
  if (!line.is_typed("--master_addr")) options.master_addr.clear();
  if (line.is_typed("--master_port")) options.master_port = typed.master_port;
  read_master_addr(options);
  options.head = read_head_options(typed, line, sources, launcher_name);
  return options;
}

std::optional<LaunchOptions> parse(int argc, const char* const* argv,
                                   CommandLine::Environment environment) {
  TypedOptions typed;
  CLI::App app(kSummary, "syncbn-launch");
  const std::vector<OptionSource> sources = describe_options(app, typed);
  const CommandLine line(sources, app, argc, argv, environment);
  try {
    app.parse(line.reversed_options());
  } catch (const CLI::Success& request) {
    app.exit(request);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    const std::string message = error.what();
    const size_t colon = std::min(message.find(':'), message.size());
    throw base::UserError(line.source_of(message.substr(0, colon)) + message.substr(colon));
  }
  if (!typed.completion.empty()) {
    const auto script = typed.completion == "bash" ? bash_completion : zsh_completion;
    fmt::print("{}", script(option_facts(app, sources)));
    return std::nullopt;
  }
  if (typed.man_page) {
    fmt::print("{}", man_page(option_facts(app, sources)));
    return std::nullopt;
  }
  if (line.program().empty()) {
    throw base::UserError(fmt::format("no program given; usage: {}", kUsage));
  }
  try {
    check_program(typed);
    check_hosts(typed, line, sources);
    const bool is_head = !hosts_option(line).empty();
    LaunchOptions options =
        is_head ? read_for_head(typed, line, sources, argv[0]) : read(typed, line, argv[0]);
    options.program = line.program();
    if (!is_head) check_nodes(line, options);
    return options;
  } catch (const base::UserError& error) {
    const std::string message = error.what();
    const size_t name_end = std::min(message.find_first_of("=: "), message.size());
    throw base::UserError(line.source_of(message.substr(0, name_end)) + message.substr(name_end));
  }
}

}  // namespace

std::string NodeRange::str() const {
  return min == max ? std::to_string(max) : fmt::format("{}:{}", min, max);
}

bool LaunchOptions::nodes_may_change() const {
  return c10d && nnodes.max > 1 && (nnodes.min < nnodes.max || max_restarts > 0);
}

Streams StreamChoice::of(int local_rank) const {
  if (by_local_rank.empty()) return all;
  const auto found = by_local_rank.find(local_rank);
  return found == by_local_rank.end() ? Streams{} : found->second;
}

std::optional<LaunchOptions> parse_options(int argc, const char* const* argv) {
  return parse(argc, argv, CommandLine::Environment::kCounts);
}

LaunchOptions parse_settled_options(const std::vector<std::string>& words) {
  std::vector<const char*> argv;
  argv.reserve(words.size());
  for (const std::string& word : words) argv.push_back(word.c_str());
  const auto options =
      parse(static_cast<int>(argv.size()), argv.data(), CommandLine::Environment::kIsSettled);
  if (!options) throw base::UserError("a node's launcher cannot be asked for help");
  return *options;
}

}  // namespace syncbn::launch

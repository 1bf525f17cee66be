#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>

#include "common/words.h"
#include "machine/devices.h"
#include "options/command_line.h"
#include "options/completion.h"
#include "options/head_options.h"
#include "options/man_page.h"
#include "options/option_help.h"
#include "options/option_table.h"
#include "options/option_values.h"
#include "options/scheduler.h"

namespace syncbn::launch {
namespace {

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
  if (nnodes == 1) return check_stdin(options, options.nproc_per_node);
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

LaunchOptions read(TypedOptions& typed, const CommandLine& line, std::string_view launcher_name) {
  LaunchOptions options = typed.options;
  options.nproc_per_node = count_workers(typed.nproc_per_node, options.virtual_local_rank);
  const bool counts_gpus = typed.nproc_per_node == "gpu" || typed.nproc_per_node == "auto";
  options.gpu_per_worker =
      options.virtual_local_rank || (counts_gpus && count_gpus(options.virtual_local_rank) > 0);
  options.binding = read_binding(typed);
  options.nnodes = read_nodes(typed.nnodes);
  read_ending(typed, options);
  options.redirects = read_stream_choice("--redirects", typed.redirects);
  options.tee = read_stream_choice("--tee", typed.tee);
  options.local_ranks_filter = read_local_ranks(typed.local_ranks_filter, options.nproc_per_node);
  options.duplicate_stdout_filters = read_filters(typed.duplicate_stdout_filters);
  options.duplicate_stderr_filters = read_filters(typed.duplicate_stderr_filters);
  options.prefix = typed.prefix;
  if (typed.prefix == "on") options.prefix = kDefaultPrefix;
  if (typed.prefix == "off") options.prefix.clear();
  options.stdin_rank = read_stdin_rank(typed.stdin_rank);
  read_event_log(typed.event_log_handler, options);
  options.given = line.options();
  options.c10d = typed.rdzv_backend == "c10d";
  if (options.c10d && !line.has("--node_rank")) options.node_rank = options.nnodes.max > 1 ? -1 : 0;
  read_rendezvous_settings(typed.rdzv_conf, options);
  if (line.has("--master_port")) options.master_port = typed.master_port;
  read_master_addr(options);
  if (!typed.rdzv_endpoint.empty()) read_endpoint(typed.rdzv_endpoint, options);
  // Nobody else has to find a node alone, and several such jobs may name one endpoint.
  if (options.c10d && options.nnodes.max == 1 && !line.has("--master_port")) {
    options.master_port.reset();
  }
  // torchrun, too, lets --standalone overrule them.
  if (options.standalone) {
    options.master_addr.clear();
    options.master_port.reset();
  }
  ask_scheduler(line, options);
  options.called_as = launcher_name;
  if (tells_local_rank(typed, line, launcher_name)) {
    options.local_rank_arg = typed.local_rank_arg;
  } else if (line.has("--local_rank_arg")) {
    throw base::UserError(
        fmt::format("--local_rank_arg={} needs --no_use_env: without it the local rank is told by "
                    "LOCAL_RANK only",
                    typed.local_rank_arg));
  }
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
  describe_help(app, sources);
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

void check_stdin(const LaunchOptions& options, int world_size) {
  if (options.stdin_rank < world_size) return;
  throw base::UserError(fmt::format("--stdin={}: the job has {} worker{}, with ranks from 0",
                                    options.stdin_rank, world_size, world_size == 1 ? "" : "s"));
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

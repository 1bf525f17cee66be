#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/config/options.h>

#include <cstdlib>
#include <optional>
#include <string_view>

#include "common/handshake.h"
#include "options/command_line.h"
#include "options/hosts.h"
#include "options/option_help.h"
#include "options/option_table.h"
#include "options/option_values.h"
#include "options/scheduler.h"

namespace syncbn::launch {
namespace {

/// Sets what the user did not give from the variables of SLURM, Open MPI or Kubernetes.
void apply_scheduler(const CommandLine& line, LaunchOptions& options) {
  if (options.standalone || options.c10d) return;
  const bool says_nodes = line.has("--nnodes");
  // A pod of an indexed job may also run a job of its own, on one node.
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

// Nobody shall lose the encryption of a former version unnoticed.
void check_tls_variable() {
  const char* const tls = std::getenv("SYNCBN_TLS");
  if (tls != nullptr && config::read_flag(tls).value_or(false)) throw_if_removed("tls");
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
  if (options.exclude_failing > 0 && options.nnodes.min == nnodes) {
    throw base::UserError(fmt::format(
        "--exclude_failing={} needs --nnodes=MIN:MAX and --rdzv_backend=c10d: a job of {} cannot "
        "go on with fewer",
        options.exclude_failing, base::counted(nnodes, "node")));
  }
  if (options.node_rank >= nnodes) {
    throw base::UserError(fmt::format(
        "--node_rank={} needs more nodes than --nnodes={}: the ranks of nodes begin at 0",
        options.node_rank, nnodes));
  }
  if (nnodes == 1) return check_stdin(options, options.nproc_per_node);
  check_tls_variable();
  const bool has_rank =
      line.has("--node_rank") || !options.scheduler.empty() || kubernetes_index().has_value();
  if (!has_rank && !options.c10d) {
    throw base::UserError(fmt::format(
        "--nnodes={0} needs --node_rank, this machine's number from 0 to {1}", nnodes, nnodes - 1));
  }
  if (options.master_addr.empty()) {
    std::string cause = fmt::format("--nnodes={}", nnodes);
    if (!options.scheduler.empty()) {
      cause = fmt::format("{}, which starts {} launchers,", options.scheduler, nnodes);
    }
    throw base::UserError(fmt::format("{} needs {}, the name or address of node 0", cause,
                                      options.c10d ? "--rdzv_endpoint" : "--master_addr"));
  }
  if (options.master_port == 0) {
    throw base::UserError(
        "--master_port=0 (any free port) is for one machine: others cannot know it");
  }
}

/// Whether to pass the local rank as an argument, as `python -m torch.distributed.launch` does.
bool passes_local_rank(const TypedOptions& typed, const CommandLine& line, std::string_view name) {
  const bool is_old_launcher = name.substr(name.rfind('/') + 1) == "torch.distributed.launch";
  const bool use_env = line.has("--use_env") ? typed.use_env : !is_old_launcher;
  return typed.no_use_env || !use_env;
}

LaunchOptions read(const TypedOptions& typed, const CommandLine& line,
                   std::string_view launcher_name) {
  LaunchOptions options = typed;
  const std::string& workers = typed.nproc_per_node_text;
  options.nproc_per_node = count_workers(workers, options.virtual_local_rank);
  const bool counts_gpus = workers == "gpu" || workers == "auto";
  options.gpu_per_worker = options.virtual_local_rank ||
                           (counts_gpus && base::count_gpus(options.virtual_local_rank) > 0);
  options.binding = read_binding(typed);
  options.nnodes = read_nodes(typed.nnodes_text);
  read_ending(typed, options);
  read_restarts(typed.max_restarts_text, options);
  options.redirects = read_stream_choice("--redirects", typed.redirects_text);
  options.tee = read_stream_choice("--tee", typed.tee_text);
  options.local_ranks_filter =
      read_local_ranks(typed.local_ranks_filter_text, options.nproc_per_node);
  options.duplicate_stdout_filters = read_filters(typed.stdout_filters_text);
  options.duplicate_stderr_filters = read_filters(typed.stderr_filters_text);
  options.prefix = typed.prefix_text;
  if (options.prefix == "on") options.prefix = kDefaultPrefix;
  if (options.prefix == "off") options.prefix.clear();
  options.stdin_rank = read_stdin_rank(typed.stdin_text);
  read_event_log(typed.event_log_handler, options);
  options.given = line.options();
  options.c10d = typed.rdzv_backend == "c10d";
  if (options.c10d && !line.has("--node_rank")) options.node_rank = options.nnodes.max > 1 ? -1 : 0;
  read_rendezvous_settings(typed.rdzv_conf, options);
  options.token = read_token(typed.token_file);
  read_master_addr(options);
  if (!typed.rdzv_endpoint.empty()) read_endpoint(typed.rdzv_endpoint, options);
  // With one node, no other node needs the port, and several such jobs may name the same endpoint.
  if (options.c10d && options.nnodes.max == 1 && !line.has("--master_port")) {
    options.master_port.reset();
  }
  // As in torchrun, --standalone overrides both.
  if (options.standalone) {
    options.master_addr.clear();
    options.master_port.reset();
  }
  apply_scheduler(line, options);
  options.called_as = launcher_name;
  if (passes_local_rank(typed, line, launcher_name)) {
    options.local_rank_arg = typed.rank_argument;
  } else if (line.has("--local_rank_arg")) {
    throw base::UserError(
        fmt::format("--local_rank_arg={} needs --no_use_env: without it the local rank is told by "
                    "LOCAL_RANK only",
                    typed.rank_argument));
  }
  return options;
}

/// Reads the options of a head; the launchers of the nodes read and check the others.
LaunchOptions read_for_head(const TypedOptions& typed, const CommandLine& line,
                            std::string_view launcher_name) {
  LaunchOptions options = typed;
  read_ending(typed, options);
  read_rendezvous_settings(typed.rdzv_conf, options);
  // Variables for these come from a scheduler, which does not know the hosts.
  if (!line.is_typed("--master_addr")) options.master_addr.clear();
  if (!line.is_typed("--master_port")) options.master_port.reset();
  read_master_addr(options);
  options.given = line.options();
  options.called_as = launcher_name;
  options.token = read_token(typed.token_file);
  if (options.token.empty()) options.token = base::make_secret();
  options.head = read_head_options(typed, line, launcher_name);
  check_tls_variable();
  return options;
}

/// The text that the options ask for instead of a run, or "".
std::string text_to_print(const TypedOptions& typed, const CommandLine& line) {
  if (typed.help) return help_text(line.program().empty() ? "" : line.program().front());
  if (typed.version) return "syncbn-launch " SYNCBN_VERSION "\n";
  return typed.completion.empty() ? "" : completion(typed.completion);
}

std::optional<LaunchOptions> parse(std::string_view launcher_name,
                                   const std::vector<std::string>& words,
                                   CommandLine::Environment environment) {
  const CommandLine line(words, environment);
  TypedOptions typed;
  config::Faults faults;
  config::Schema<TypedOptions>::get().read(line.values(), typed, "", faults);
  faults.throw_if_any();
  if (const std::string text = text_to_print(typed, line); !text.empty()) {
    base::write_stdout(text);
    return std::nullopt;
  }
  if (line.program().empty()) {
    throw base::UserError(fmt::format("no program given; usage: {}", kUsage));
  }
  try {
    if (typed.module && typed.no_python) {
      throw base::UserError(
          "--module runs Python, and --no_python forbids it; leave one of them out");
    }
    if (typed.use_env && typed.no_use_env) {
      throw base::UserError("--use_env and --no_use_env exclude each other");
    }
    check_hosts(typed, line);
    const bool is_head = !hosts_option(line).empty();
    LaunchOptions options =
        is_head ? read_for_head(typed, line, launcher_name) : read(typed, line, launcher_name);
    options.program = line.program();
    if (!is_head) check_nodes(line, options);
    return options;
  } catch (const base::UserError& error) {
    line.fail(error.what());
  }
}

}  // namespace

std::string NodeRange::str() const {
  return min == max ? std::to_string(max) : fmt::format("{}:{}", min, max);
}

bool LaunchOptions::nodes_may_change() const {
  return c10d && nnodes.max > 1 && (nnodes.min < nnodes.max || max_restarts > 0);
}

size_t LaunchOptions::store_bytes() const {
  if (store_mib > 0) return static_cast<size_t>(store_mib) << 20;
  // Gloo's ranks publish an address for each of the others: about 64 bytes each.
  constexpr size_t kBase = size_t{64} << 20;
  constexpr size_t kPerWorker = size_t{256} << 10;
  return kBase + kPerWorker * static_cast<size_t>(nnodes.max) * static_cast<size_t>(nproc_per_node);
}

Streams StreamChoice::of(int local_rank) const {
  if (by_local_rank.empty()) return all;
  const auto found = by_local_rank.find(local_rank);
  return found == by_local_rank.end() ? Streams{} : found->second;
}

void check_stdin(const LaunchOptions& options, int world_size) {
  if (options.stdin_rank < world_size) return;
  throw base::UserError(fmt::format("--stdin={}: the job has {}, with ranks from 0",
                                    options.stdin_rank, base::counted(world_size, "worker")));
}

std::optional<LaunchOptions> parse_options(int argc, const char* const* argv) {
  return parse(argv[0], {argv + 1, argv + argc}, CommandLine::Environment::kCounts);
}

LaunchOptions parse_settled_options(const std::vector<std::string>& words) {
  const auto options =
      parse(words.at(0), {words.begin() + 1, words.end()}, CommandLine::Environment::kIsSettled);
  if (!options) throw base::UserError("a node's launcher does not take --help");
  return *options;
}

}  // namespace syncbn::launch

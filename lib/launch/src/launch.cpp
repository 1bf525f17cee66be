#include <syncbn/launch/launch.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/log.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/text.h>
#include <syncbn/launch/options.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "common/processes.h"
#include "job/explain.h"
#include "job/run_context.h"
#include "job/status_socket.h"
#include "nodes/coordinator.h"
#include "nodes/local_link.h"
#include "nodes/master_port.h"
#include "nodes/tcp_link.h"
#include "options/hosts.h"
#include "output/event_log.h"
#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "preflight/preflight.h"
#include "ssh/head_plan.h"
#include "ssh/ssh_head.h"
#include "ssh/ssh_node.h"
#include "supervisor.h"
#include "workers/program.h"

namespace syncbn::launch {
namespace {

// A caller may have closed them (`<&-`); a worker's pipe must not get one of their numbers.
void open_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd >= 0) ::close(fd);
}

// Holds the port of a run on one node for its rank 0.
base::HeldPort hold_master_port(RunContext& context) {
  if (!is_local_address(context.master_addr)) {
    throw base::UserError(
        fmt::format("--master_addr={} is not an address of this machine, so that rank 0 could not "
                    "listen there; leave it out, or start the other nodes with --nnodes",
                    context.master_addr));
  }
  base::HeldPort port = hold_port(context.master_port);
  context.master_port = port.port();
  return port;
}

// One node coordinates the others: node 0 or, if ranks are not given, the first launcher on the
// endpoint's host. Returns its listening socket, or nothing on the other nodes.
base::UniqueFd listen_for_nodes(const LaunchOptions& options, const RunContext& context) {
  bool may_lead = options.node_rank == 0;
  if (options.c10d) {
    std::string reason;
    may_lead = options.is_host ? *options.is_host : is_local_address(context.master_addr, reason);
    if (!reason.empty()) {
      base::write_stderr(fmt::format(
          "syncbn-launch: cannot find {}: {}; if that is this machine, --rdzv_conf=is_host=1 tells "
          "this launcher to lead\n",
          context.master_addr, reason));
    }
  }
  if (!may_lead) return {};
  base::UniqueFd listener = listen_on(context.master_port, listen_address(options));
  // If ranks are not given, another launcher on this host may already listen.
  const bool has_to_lead = !options.c10d || options.is_host;
  if (!listener && has_to_lead) throw_port_error(context.master_port);
  return listener;
}

void announce_threads(const LaunchOptions& options, const RunContext& context) {
  const auto& counts = context.omp_num_threads;
  if (counts.empty() || options.message_scope == MessageScope::kOwnWorkers) return;
  const auto [min, max] = std::minmax_element(counts.begin(), counts.end());
  const std::string threads =
      *min == *max ? std::to_string(*min) : fmt::format("{} to {}", *min, *max);
  base::write_stderr(
      fmt::format("syncbn-launch: OMP_NUM_THREADS={} for each of {} workers on {} (set it to "
                  "choose another)\n",
                  threads, options.nproc_per_node, base::counted(base::usable_cpus(), "core")));
}

void announce_scheduler(const LaunchOptions& options, const RunContext& context) {
  if (options.scheduler.empty() || context.node != 0) return;
  base::write_stderr(
      fmt::format("syncbn-launch: one run on {} nodes, according to {}; node 0 is {}:{} "
                  "(--standalone starts a run of its own on each)\n",
                  context.nodes, options.scheduler, context.master_addr, context.master_port));
}

void check_gpus(const LaunchOptions& options) {
  const auto gpus = base::count_gpus_at_hand(options.virtual_local_rank);
  if (!gpus || options.nproc_per_node <= *gpus) return;
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string there = fmt::format(
      "{} but {} ({})", base::counted(options.nproc_per_node, "worker"),
      base::counted(*gpus, "GPU"),
      visible == nullptr ? "/proc/driver/nvidia" : fmt::format("CUDA_VISIBLE_DEVICES={}", visible));
  if (options.virtual_local_rank) {
    throw base::UserError(fmt::format(
        "--virtual_local_rank: {}; each worker needs one: start fewer, or leave the option out",
        there));
  }
  if (*gpus == 0) return;
  base::write_stderr(fmt::format(
      "syncbn-launch: warning: {}: local ranks {} and up get no GPU (fine for CPU training)\n",
      there, *gpus));
}

// Only a warning: one command line may serve nodes with different numbers of workers.
void check_streams(const LaunchOptions& options) {
  const auto check = [&](const char* option, const StreamChoice& choice) {
    const auto last = choice.by_local_rank.rbegin();
    if (last == choice.by_local_rank.rend() || last->first < options.nproc_per_node) return;
    base::write_stderr(fmt::format(
        "syncbn-launch: warning: {}: there is no local rank {}; this node has {}, from local rank "
        "0\n",
        option, last->first, base::counted(options.nproc_per_node, "worker")));
  };
  check("--redirects", options.redirects);
  check("--tee", options.tee);
}

// If the program is missing here only, the other nodes would wait for this one until their
// --join_timeout.
Command find_command(const LaunchOptions& options, const RunContext& context) {
  const bool is_alone = options.message_scope == MessageScope::kAlone && !options.dry_run;
  try {
    Command command = resolve_program(options);
    // Ranks report such a mistake themselves, but on several nodes only after all nodes have
    // joined.
    if (context.nodes > 1 && is_alone) {
      Variables variables = worker_variables(options, context, 0);
      // Any node may become the first: its rank 0 reads the files of `init` and `resume`.
      if (options.node_rank < 0) variables["RANK"] = std::to_string(context.ranks.world_size - 1);
      check_arguments(command, variables);
    }
    return command;
  } catch (const ProgramError& error) {
    const bool is_awaited = is_alone && options.node_rank > 0 && !options.nodes_may_change();
    if (is_awaited) {
      base::write_stderr(
          "syncbn-launch: this node cannot start the program; telling node 0 (10 s at most)\n");
      TcpLink(options, context.master_port).report_no_start(error.exit_code(), error.what());
    }
    throw;
  }
}

int run(const LaunchOptions& options, SshNode* node) {
  check_gpus(options);
  check_streams(options);
  RunContext context = make_run_context(options);
  const Command command = find_command(options, context);
  std::optional<base::HeldPort> port;
  if (context.nodes == 1) port = hold_master_port(context);
  if (options.dry_run) {
    base::write_stdout(render_plan(options, context, command));
    return base::kExitOk;
  }
  if (!options.is_check) {
    announce_scheduler(options, context);
    announce_threads(options, context);
  }
  const std::string warning = local_rank_warning(options, command);
  if (!warning.empty() && options.message_scope != MessageScope::kOwnWorkers) {
    base::write_stderr(fmt::format("syncbn-launch: warning: {}\n", warning));
  }
  std::unique_ptr<NodeLink> link;
  if (port) {
    link = std::make_unique<LocalLink>(options, context, *std::move(port));
  } else if (base::UniqueFd listener = listen_for_nodes(options, context)) {
    link = std::make_unique<Coordinator>(options, context, std::move(listener));
  } else {
    link = std::make_unique<TcpLink>(options, context.master_port);
  }
  return Supervisor(options, context, command, std::move(link), node).run();
}

int run_on_hosts(const LaunchOptions& options) {
  std::vector<NodePlan> nodes = plan_nodes(options);  // slow; before SshHead blocks signals
  if (!options.dry_run) return SshHead(options, std::move(nodes)).run();
  base::write_stdout(render(nodes, exported_variables(options.head.exports)));
  return base::kExitOk;
}

constexpr const char* kStatusHelp =
    "usage: syncbn-launch status [PID | JOB]\n\n"
    "Prints each job's program and what each of its ranks does now, on all nodes. Asks all your\n"
    "launchers on this machine, or the one with this PID, job name or job ID.\n";
constexpr const char* kExplainHelp =
    "usage: syncbn-launch explain [--save=FILE] [--torch=FOLDER] FILE... | PID\n\n"
    "Says in words which rank did not make which call. FILE is the flight.jsonl that a\n"
    "launcher has left (node 0's has all ranks). PID is a launcher that runs: it asks those\n"
    "of all nodes. --save writes the records to a file, --torch in the form of torch's\n"
    "fr_trace.\n";

// Finds the errors that run() would find, before any host has started. The head does not show the
// warning that this prints; run() prints it again.
void check_machine(const LaunchOptions& options) {
  check_gpus(options);
  cpus_of_workers(options);
  LogFolder::check(options);
  EventLog::check(options);
}

int run_as_node() {
  SshNode node;
  const auto options = node.prepare(check_machine);
  return options ? run(*options, &node) : node.exit_code();
}

int run_job(const LaunchOptions& options) {
  return options.head.hosts.empty() ? run(options, nullptr) : run_on_hosts(options);
}

}  // namespace

int launch(int argc, const char* const* argv) {
  open_standard_streams();
  raise_descriptor_limit();
  limit_name_lookups();
  if (argc == 2 && std::string_view(argv[1]) == kFromHead) return run_as_node();
  if (argc == 3 && std::string_view(argv[1]) == kPreflightWorker) {
    return run_preflight_worker(argv[2]);
  }
  // Programs of these names are ./status and ./explain.
  const std::string_view command = argc >= 2 ? argv[1] : "";
  const std::string_view word = argc == 3 ? argv[2] : "";
  const bool asks_for_help = word == "--help" || word == "-h";
  if (command == "status" && argc <= 3) {
    asks_for_help ? base::write_stdout(kStatusHelp) : print_status(std::string(word));
    return base::kExitOk;
  }
  if (command == "explain") {
    asks_for_help ? base::write_stdout(kExplainHelp) : explain({argv + 2, argv + argc});
    return base::kExitOk;
  }
  const std::optional<LaunchOptions> options = parse_options(argc, argv);
  if (!options) return base::kExitOk;
  if (!options->report.empty() && !options->dry_run) base::check_can_write(options->report);
  if (options->preflight && !options->dry_run) {
    int exit_code = base::kExitOk;
    {
      // Restores what the check blocks: Ctrl-C ends the launcher again until the run begins.
      const base::SignalMask mask(SIG_BLOCK, {});
      exit_code = run_job(preflight_job(*options));
    }
    if (exit_code != base::kExitOk) {
      Output output{OutputOptions()};
      write_report(output, options->report, json_report(exit_code));
      return exit_code;
    }
  }
  return run_job(*options);
}

}  // namespace syncbn::launch

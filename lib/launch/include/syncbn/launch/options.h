#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// Upper bound on --nproc_per_node.
inline constexpr int kMaxWorkers = 4096;

inline constexpr const char* kDefaultPrefix = "[${host}:${rank}] ";

/// A number of nodes, or a range of them.
struct NodeRange {
  int min = 1;
  int max = 1;

  /// "4" or "2:4"
  std::string str() const;
};

/// Standard streams of a worker.
struct Streams {
  bool out = false;
  bool err = false;
};

/// Streams for all workers, or for some by local rank.
struct StreamChoice {
  Streams all;
  /// If not empty, ranks that are not listed have no streams. Listed ranks may be absent.
  std::map<int, Streams> by_local_rank;

  Streams of(int local_rank) const;
};

/// Processors that a worker may use; see bind_workers().
enum class Binding { kNone, kCores, kNode, kSocket, kExclusive };

/// Where a run writes its events, as lines of JSON.
enum class EventTarget { kNone, kConsole, kLogFolder, kFile };

/// A machine to reach by ssh.
struct Host {
  std::string user;  ///< empty: ssh's default
  std::string name;
  int slots = 0;  ///< workers; 0: as --nproc_per_node says

  std::string full_name() const { return user.empty() ? name : user + "@" + name; }
};

/// How all nodes are started from one command.
struct HeadOptions {
  std::vector<Host> hosts;       ///< the nodes in order of rank; empty: this launcher is not a head
  std::vector<std::string> ssh;  ///< the command and its options, before the host
  std::string launcher;          ///< path on the hosts; empty: as on this machine
  std::chrono::milliseconds ssh_timeout{};  ///< for all hosts to answer
  std::vector<std::string> exports;         ///< patterns; see exported_variables()
  std::vector<std::string> node_options;    ///< options for the nodes' launchers, spelled in full
};

/// Which messages a launcher prints. The nodes that a head has started share one terminal.
enum class MessageScope {
  kAlone,       ///< all messages: no head has started this launcher
  kWholeJob,    ///< all messages, for the first node of a head
  kOwnWorkers,  ///< messages about its own workers, for the other nodes
};

/// The command line's and the environment's options, checked.
struct LaunchOptions {
  int nproc_per_node = 1;
  std::string role = "default";
  bool oversubscribe = false;       ///< allow more than 32 workers per usable core
  bool virtual_local_rank = false;  ///< each worker sees its GPU as the only one
  bool gpu_per_worker = false;      ///< because of --nproc_per_node or --virtual_local_rank
  Binding binding = Binding::kNone;

  NodeRange nnodes;
  int node_rank = 0;               ///< -1: assigned by node 0
  std::string master_addr;         ///< empty: not given
  std::optional<int> master_port;  ///< 0: any free one
  bool standalone = false;
  std::string scheduler;  ///< the one that gave this node its rank; empty: none
  bool c10d = false;      ///< --rdzv_backend=c10d: nodes need no rank
  std::string run_id = "none";
  std::string local_addr;                           ///< empty: not given
  std::chrono::milliseconds join_timeout{600'000};  ///< for nnodes.min nodes to join
  std::chrono::milliseconds last_call{30'000};      ///< for more nodes to join after that
  std::chrono::milliseconds alive_period{5'000};    ///< between two heartbeats
  int alive_misses = 3;         ///< a node is lost after this many periods without a heartbeat
  std::string token;            ///< secret that launchers prove to each other; empty: none
  int64_t store_mib = 0;        ///< upper bound on the store's memory; 0: by the number of workers
  std::string listen;           ///< where node 0 listens: address or interface; empty: everywhere
  std::optional<bool> is_host;  ///< with c10d: whether this launcher leads; empty: it finds out

  int max_restarts = 0;
  /// Time within which max_restarts counts; 0: the whole run.
  std::chrono::milliseconds restart_window{};
  int exclude_failing = 0;  ///< failures after which the job continues without a node; 0: never
  std::string signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::vector<int> ending_signals;               ///< signals_to_handle without SIGUSR1, SIGUSR2
  std::chrono::milliseconds shutdown_timeout{};  ///< between SIGTERM and SIGKILL
  /// Upper bound on the time to a worker's next step; 0: none; not given: the worker's own timeout.
  std::optional<std::chrono::milliseconds> hang_timeout;
  /// Time between comparisons of the ranks' speed; 0: never.
  std::chrono::milliseconds straggler_interval{};

  int stdin_rank = 0;          ///< the worker that reads the launcher's input; -1: none
  bool module = false;         ///< -m: the program is a Python module's name
  bool no_python = false;      ///< run a *.py file like any other program
  bool run_path = false;       ///< run the program with Python's runpy.run_path
  std::string local_rank_arg;  ///< first argument of the program, before "=RANK"; empty: none

  /// Printed before each line if there are several workers. May contain ${host}, ${rank},
  /// ${local_rank}, ${role_name} and ${time}. Empty: none.
  std::string prefix;
  std::string log_dir;                  ///< empty: not given
  StreamChoice redirects;               ///< streams for log files only
  StreamChoice tee;                     ///< streams for log files as well
  std::vector<int> local_ranks_filter;  ///< show the output of these; empty: of all
  /// Copy lines with one of these texts to filtered_stdout.log, filtered_stderr.log.
  std::vector<std::string> duplicate_stdout_filters;
  std::vector<std::string> duplicate_stderr_filters;
  std::string report;  ///< file for a report in JSON; empty: none
  EventTarget events = EventTarget::kNone;
  std::string events_file = {};  ///< for kFile
  bool dry_run = false;
  bool preflight = false;  ///< check the machines before the start
  bool is_check = false;   ///< this job is the check of --preflight
  HeadOptions head = {};
  MessageScope message_scope = MessageScope::kAlone;
  std::optional<Streams> colours = {};  ///< streams of the head that show colours; empty: no head

  std::string called_as = {};           ///< the launcher's argv[0]
  std::vector<std::string> given = {};  ///< all options, with the environment's, spelled in full
  std::vector<std::string> program;     ///< the program's name and its arguments, unchanged

  /// Whether nodes may join and leave during the job. Needs c10d, and a range of nodes or, to
  /// replace lost nodes, restarts.
  bool nodes_may_change() const;
  /// Time without messages after which a node counts as lost.
  std::chrono::milliseconds silence() const { return alive_period * alive_misses; }
  /// Upper bound on the memory of the workers' store, in bytes.
  size_t store_bytes() const;
};

/// Reads argv[1…] up to the program's name: dashes or underscores, unambiguous prefixes, `--x=v` or
/// `--x v`. The environment (PET_NNODES for --nnodes, and so on) sets options that are not given.
/// @return empty after --help and similar options, which print to stdout.
/// @throws base::UserError for an unknown option, a bad value, or options that exclude each other.
std::optional<LaunchOptions> parse_options(int argc, const char* const* argv);

/// Like parse_options(), for a command line from a head, which already includes the options of the
/// head's environment.
LaunchOptions parse_settled_options(const std::vector<std::string>& words);

/// @throws base::UserError if --stdin names a rank that a job of `world_size` workers lacks.
void check_stdin(const LaunchOptions& options, int world_size);

}  // namespace syncbn::launch

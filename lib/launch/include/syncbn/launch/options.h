#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// The most workers that one machine may be asked for.
inline constexpr int kMostWorkers = 4096;

inline constexpr const char* kDefaultPrefix = "[${host}:${rank}] ";

/// A number of nodes, or a range of them.
struct NodeRange {
  int min = 1;
  int max = 1;

  /// As it is typed: "4" or "2:4".
  std::string str() const;
};

/// Which standard streams of a worker; a set of bits, numbered as torchrun's -r and -t do.
struct Streams {
  bool out = false;  ///< 1
  bool err = false;  ///< 2
};

/// Streams for all workers, or for some by local rank.
struct StreamChoice {
  Streams all;
  std::map<int, Streams>
      by_local_rank;  ///< when not empty, others have none; may name absent ranks

  Streams of(int local_rank) const;
};

/// Which processors a worker may use (bind_workers() says how they are chosen).
enum class Binding { kNone, kCores, kNode, kSocket, kExclusive };

/// Where the events of a run go, as lines of JSON.
enum class EventTarget { kNone, kConsole, kLogFolder, kFile };

/// A machine that is reached by ssh.
struct Host {
  std::string user;  ///< empty: ssh's own choice
  std::string name;
  int slots = 0;  ///< workers; 0: --nproc_per_node tells

  std::string full_name() const { return user.empty() ? name : user + "@" + name; }
};

/// How all nodes are started from one command.
struct HeadOptions {
  std::vector<Host> hosts;       ///< the nodes in order of their ranks; empty: no head is wanted
  std::vector<std::string> ssh;  ///< the command and its options, before the host
  std::string launcher;          ///< on the hosts; empty: where it is here
  std::chrono::milliseconds ssh_timeout{};  ///< for all hosts to answer
  bool ssh_all = false;                     ///< also this machine
  std::vector<std::string> exports;         ///< what of the environment goes along; see exports.h
  /// What the nodes' launchers are told: the options, spelled in full, and the launcher's own name.
  std::vector<std::string> node_options;
  std::string launcher_name;
};

/// Whom a launcher speaks for, where several show their messages on one terminal.
enum class Voice {
  kOwn,      ///< it is the only one there
  kForAll,   ///< of a head's nodes the first says what concerns all
  kOfItself  ///< and the others only what concerns their own workers
};

/// What the command line and the PET_* environment ask for, checked.
struct LaunchOptions {
  int nproc_per_node = 1;
  std::string role = "default";
  bool oversubscribe = false;       ///< allows more workers per core than can be of use
  bool virtual_local_rank = false;  ///< each worker sees its GPU as the only one
  bool gpu_per_worker = false;      ///< asked for by --nproc_per_node or --virtual_local_rank
  Binding binding = Binding::kNone;

  NodeRange nnodes;
  int node_rank = 0;               ///< -1: any
  std::string master_addr;         ///< empty: not given
  std::optional<int> master_port;  ///< 0: any free one
  bool standalone = false;
  std::string scheduler;  ///< that said where this node stands; empty: none
  bool c10d = false;      ///< --rdzv_backend: node ranks need not be given
  std::string run_id = "none";
  std::string local_addr;                           ///< empty: not given
  std::chrono::milliseconds join_timeout{600'000};  ///< for all nodes, or the fewest, to come
  std::chrono::milliseconds last_call{30'000};      ///< for more, once the fewest are there
  std::chrono::milliseconds alive_period{5'000};    ///< between two signs of life
  int alive_misses = 3;         ///< so many periods without one: the other is gone
  std::optional<bool> is_host;  ///< with c10d: whether this launcher leads; empty: finds out

  int max_restarts = 0;
  std::string signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::vector<int> ending_signals;               ///< those of them that end the run
  std::chrono::milliseconds shutdown_timeout{};  ///< between SIGTERM and SIGKILL

  int stdin_rank = 0;      ///< of the worker that reads the launcher's input; -1: none
  bool module = false;     ///< -m: the program is a Python module's name
  bool no_python = false;  ///< run a *.py file as any other program
  bool run_path = false;   ///< through Python's runpy.run_path
  /// Put right after the program's name, with "=<local rank>"; empty: only the environment tells.
  std::string local_rank_arg;

  /// Before each line of several workers, with ${host}, ${rank}, ${local_rank}, ${role_name} and
  /// ${time}; empty: lines pass as they are.
  std::string prefix;
  std::string log_dir;                  ///< empty: not given
  StreamChoice redirects;               ///< to log files only
  StreamChoice tee;                     ///< to log files as well
  std::vector<int> local_ranks_filter;  ///< whose output is shown; empty: everybody's
  /// Lines with one of these texts are copied to filtered_stdout.log, filtered_stderr.log.
  std::vector<std::string> duplicate_stdout_filters;
  std::vector<std::string> duplicate_stderr_filters;
  std::string report;  ///< the file for a report in JSON; empty: none
  EventTarget events = EventTarget::kNone;
  std::string events_file = {};  ///< for kFile
  bool dry_run = false;
  HeadOptions head = {};
  /// Of a node that a head has started.
  Voice voice = Voice::kOwn;
  std::optional<Streams> colours = {};  ///< the head's streams that take them; empty: ask our own

  std::string called_as = {};           ///< the launcher's argv[0]
  std::vector<std::string> given = {};  ///< the options, also the environment's, spelled in full
  std::vector<std::string> program;     ///< the program's name and its arguments, untouched

  /// Whether nodes may come and go during the job: with c10d, for a range of nodes; and for a fixed
  /// number with restarts, where another may take the place of one that is lost.
  bool nodes_may_change() const;
};

/// Reads argv[1…] (dashes or underscores, unambiguous prefixes of long options, `--x=v` or `--x v`)
/// up to the program's name; everything after it is the program's. What is not on the command line
/// is taken from the environment: PET_NNODES for --nnodes, and so on.
/// @throws base::UserError with one message: unknown option, bad value, options that exclude each
///   other.
/// Empty after --help or --version, whose text went to stdout.
std::optional<LaunchOptions> parse_options(int argc, const char* const* argv);

/// The same for words that hold what the environment asks for already, as a head settles them.
LaunchOptions parse_settled_options(const std::vector<std::string>& words);

/// @throws base::UserError when --stdin names a rank that a job of `world_size` workers lacks.
void check_stdin(const LaunchOptions& options, int world_size);

}  // namespace syncbn::launch

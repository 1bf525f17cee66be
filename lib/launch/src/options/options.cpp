#include <syncbn/launch/options.h>

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/log.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/config/duration.h>
#include <syncbn/config/options.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

#include "common/handshake.h"
#include "common/words.h"
#include "options/command_line.h"
#include "options/hosts.h"
#include "options/option_help.h"
#include "options/option_table.h"
#include "options/scheduler.h"

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kDay = std::chrono::hours(24);

std::vector<int> read_signals(const std::string& typed) {
  std::vector<int> signals;
  for (const std::string& name : words_of(typed)) {
    if (name == "SIGUSR1" || name == "SIGUSR2") continue;  // always passed on to the workers
    constexpr std::array kEnding{SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    const auto signal = std::ranges::find(kEnding, name, base::signal_name);
    if (signal == kEnding.end()) {
      throw base::UserError(fmt::format(
          "--signals_to_handle={}: '{}' is not one of SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, "
          "SIGUSR2",
          typed, name));
    }
    signals.push_back(*signal);
  }
  return signals;
}

std::optional<Streams> read_streams(std::string_view number) {
  if (number.size() != 1 || number[0] < '0' || number[0] > '3') return std::nullopt;
  const int bits = number[0] - '0';
  return Streams{.out = (bits & 1) != 0, .err = (bits & 2) != 0};
}

// torchrun ignores unknown names, so a misspelt setting would have no effect.
void check_spelling_of_setting(const std::string& typed, const std::string& name,
                               const std::vector<std::string>& settings) {
  static const std::vector<std::string> kWithoutEffect{
      "timeout",    "close_timeout", "read_timeout", "heartbeat_timeout", "shutdown_timeout",
      "store_type", "use_libuv",     "rank",         "local_addr"};
  if (std::ranges::count(kWithoutEffect, name) > 0) return;
  const std::string hint = base::did_you_mean(name, settings);
  if (hint.empty()) return;
  throw base::UserError(
      fmt::format("--rdzv_conf={}: there is no setting '{}'{}", typed, name, hint));
}

// Each of these reads the value of the option that it is named after. They throw base::UserError
// that names the option and its value.

// A time: seconds, or a number with a unit, as 500ms, 30s, 5m or 5min, 2h, 1d.
milliseconds read_time(const std::string& option, const std::string& typed, milliseconds min,
                       milliseconds max) {
  const auto time = config::parse_time(typed);
  if (time && *time >= min && *time <= max) return *time;
  const auto seconds = [](milliseconds one) { return std::chrono::duration<double>(one).count(); };
  throw base::UserError(
      fmt::format("{}={}: expected a time from {:.10g} s to {:.10g} s, in seconds or with a unit, "
                  "as 500ms, 90s, 5m, 2h, 1d",
                  option, typed, seconds(min), seconds(max)));
}

int count_workers(const std::string& typed, bool virtual_local_rank) {
  if (typed == "cpu") return base::usable_cpus();
  if (typed == "auto" || typed == "gpu") {
    const int gpus = base::count_gpus(virtual_local_rank);
    if (gpus > 0) return gpus;
    if (typed == "auto") return base::usable_cpus();
    throw base::UserError(
        "--nproc_per_node=gpu: no GPU is visible (CUDA_VISIBLE_DEVICES, /proc/driver/nvidia, "
        "NVML); use a number, or cpu");
  }
  const auto count = base::parse_number<int>(typed);
  if (!count || *count < 1 || *count > kMaxWorkers) {
    throw base::UserError(
        fmt::format("--nproc_per_node={}: expected a number from 1 to {}, or auto, cpu, gpu", typed,
                    kMaxWorkers));
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
  return cores ? Binding::kCores : Binding::kNone;
}

NodeRange read_nodes(const std::string& typed) {
  constexpr int kMax = 65536;
  const size_t colon = typed.find(':');
  const auto min = base::parse_number<int>(typed.substr(0, colon));
  const auto max = colon == typed.npos ? min : base::parse_number<int>(typed.substr(colon + 1));
  if (!min || !max || *min < 1 || *max < *min || *max > kMax) {
    throw base::UserError(
        fmt::format("--nnodes={}: expected a number from 1 to {}, or a range as 2:4", typed, kMax));
  }
  return {*min, *max};
}

StreamChoice read_stream_choice(const std::string& option, const std::string& typed) {
  if (const auto all = read_streams(typed)) return {.all = *all, .by_local_rank = {}};
  StreamChoice choice;
  for (const std::string& word : words_of(typed)) {
    const size_t colon = std::min(word.find(':'), word.size());
    const auto local_rank = base::parse_number<int>(word.substr(0, colon));
    const auto streams = read_streams(word.substr(std::min(colon + 1, word.size())));
    if (!local_rank || !streams || *local_rank < 0) {
      throw base::UserError(
          fmt::format("{}={}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or some for "
                      "each local rank, as 0:3,1:2",
                      option, typed));
    }
    choice.by_local_rank[*local_rank] = *streams;
  }
  return choice;
}

std::vector<int> read_local_ranks(const std::string& typed, int nproc) {
  std::vector<int> ranks;
  for (const std::string& word : words_of(typed)) {
    const auto rank = base::parse_number<int>(word);
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

// -1 for none.
int read_stdin_rank(const std::string& typed) {
  if (typed == "none") return -1;
  const auto rank = base::parse_number<int>(typed);
  if (rank && *rank >= 0) return *rank;
  throw base::UserError(fmt::format("--stdin={}: expected a rank, or none", typed));
}

// Splits texts at commas as torchrun does: ",," is a comma in a text.
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

// --rdzv_conf, with torchrun's names. Settings of torchrun's own store have no effect.
void read_rendezvous_settings(const std::string& typed, LaunchOptions& options) {
  std::string_view settings = typed;
  // Arguments from a Python or YAML list may still have the quotes that a shell would remove.
  const bool is_quoted = settings.size() > 1 && settings.front() == settings.back() &&
                         (settings.front() == '\'' || settings.front() == '"');
  if (is_quoted) settings = settings.substr(1, settings.size() - 2);
  for (const std::string& word : words_of(settings)) {
    if (word.empty()) continue;  // as in torchrun, an extra comma is accepted
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (equals == std::string::npos) {
      throw base::UserError(fmt::format(
          "--rdzv_conf={}: expected NAME=VALUE with commas between, got '{}'", typed, word));
    }
    const std::string value = word.substr(equals + 1);
    const auto number = [&](int max) {
      const auto read = base::parse_number<int>(value);
      if (read && *read >= 1 && *read <= max) return *read;
      throw base::UserError(fmt::format(
          "--rdzv_conf={}: {} is a whole number from 1 to {}, got '{}'", typed, name, max, value));
    };
    const auto time = [&](milliseconds min, milliseconds max) {
      return read_time(fmt::format("--rdzv_conf={}: {}", typed, name), value, min, max);
    };
    constexpr milliseconds kMaxTime = 3650 * kDay;
    constexpr milliseconds kSecond{1000};
    constexpr int kMaxMisses = 10'000;
    constexpr int kMaxMib = 1 << 20;
    const auto flag = [&] {
      if (const auto read = config::read_flag(value)) return *read;
      throw base::UserError(
          fmt::format("--rdzv_conf={}: is_host is true or false, got '{}'", typed, value));
    };
    const std::map<std::string, std::function<void()>> settings{
        {"join_timeout", [&] { options.join_timeout = time(kSecond, kMaxTime); }},
        {"last_call_timeout", [&] { options.last_call = time(milliseconds(0), kMaxTime); }},
        {"keep_alive_interval", [&] { options.alive_period = time(kSecond, kDay); }},
        {"keep_alive_max_attempt", [&] { options.alive_misses = number(kMaxMisses); }},
        {"store_mib", [&] { options.store_mib = number(kMaxMib); }},
        {"is_host", [&] { options.is_host = flag(); }}};
    // torchrun reads `timeout` in a static rendezvous only.
    const auto setting = settings.find(name == "timeout" && !options.c10d ? "join_timeout" : name);
    if (setting != settings.end()) {
      setting->second();
    } else {
      std::vector<std::string> names;
      names.reserve(settings.size());
      for (const auto& [known, read] : settings) names.push_back(known);
      check_spelling_of_setting(typed, name, names);
    }
  }
}

void read_restarts(const std::string& typed, LaunchOptions& options) {
  constexpr int kMax = 1'000'000;
  const size_t slash = std::min(typed.find('/'), typed.size());
  const auto count = base::parse_number<int>(typed.substr(0, slash));
  bool is_valid = count && *count >= 0 && *count <= kMax;
  if (slash < typed.size()) {
    const auto window = config::parse_time(std::string_view(typed).substr(slash + 1));
    is_valid = is_valid && window && *window >= std::chrono::seconds(1);
    if (is_valid) options.restart_window = *window;
  }
  if (!is_valid) {
    throw base::UserError(fmt::format(
        "--max_restarts={}: expected a number from 0 to {}, or one within a time, as 5/1h", typed,
        kMax));
  }
  options.max_restarts = *count;
}

void read_ending(const TypedOptions& typed, LaunchOptions& options) {
  options.ending_signals = read_signals(options.signals_to_handle);
  options.shutdown_timeout =
      read_time("--shutdown_timeout", typed.shutdown_text, milliseconds(0), kDay);
  options.straggler_interval =
      read_time("--straggler_interval", typed.straggler_text, milliseconds(0), kDay);
  if (!typed.hang_text.empty()) {
    options.hang_timeout = read_time("--hang_timeout", typed.hang_text, milliseconds(0), 7 * kDay);
  }
}

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

// What the launcher of a node needs beyond read().
void read_for_node(const TypedOptions& typed, const CommandLine& line, LaunchOptions& options) {
  const std::string& workers = typed.nproc_per_node_text;
  options.nproc_per_node = count_workers(workers, options.virtual_local_rank);
  const bool counts_gpus = workers == "gpu" || workers == "auto";
  options.gpu_per_worker = options.virtual_local_rank ||
                           (counts_gpus && base::count_gpus(options.virtual_local_rank) > 0);
  options.binding = read_binding(typed);
  options.nnodes = read_nodes(typed.nnodes_text);
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
  if (options.c10d && !line.has("--node_rank")) options.node_rank = options.nnodes.max > 1 ? -1 : 0;
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
  if (passes_local_rank(typed, line, options.called_as)) {
    options.local_rank_arg = typed.rank_argument;
  } else if (line.has("--local_rank_arg")) {
    throw base::UserError(
        fmt::format("--local_rank_arg={} needs --no_use_env: without it the local rank is told by "
                    "LOCAL_RANK only",
                    typed.rank_argument));
  }
  check_nodes(line, options);
}

// What a head needs beyond read(). The launchers of the nodes read and check the other options.
void read_for_head(const TypedOptions& typed, const CommandLine& line, LaunchOptions& options) {
  // Variables for these come from a scheduler, which does not know the hosts.
  if (!line.is_typed("--master_addr")) options.master_addr.clear();
  if (!line.is_typed("--master_port")) options.master_port.reset();
  if (options.token.empty()) options.token = base::make_secret();
  options.head = read_head_options(typed, line);
  options.head.ssh_timeout =
      read_time("--ssh_timeout", typed.ssh_timeout_text, milliseconds(100), kDay);
  check_tls_variable();
}

LaunchOptions read(const TypedOptions& typed, const CommandLine& line,
                   std::string_view launcher_name) {
  const bool is_head = !hosts_option(line).empty();
  LaunchOptions options = typed;
  options.called_as = launcher_name;
  options.given = line.options();
  options.program = line.program();
  options.c10d = !is_head && typed.rdzv_backend == "c10d";
  read_ending(typed, options);
  read_rendezvous_settings(typed.rdzv_conf, options);
  options.token = read_token(typed.token_file);
  // Without the brackets of an IPv6 address.
  const auto master = base::parse_host_port(options.master_addr);
  if (master && !master->port) options.master_addr = master->host;
  is_head ? read_for_head(typed, line, options) : read_for_node(typed, line, options);
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
    return read(typed, line, launcher_name);
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

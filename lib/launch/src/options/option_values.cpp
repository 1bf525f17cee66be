#include "options/option_values.h"

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/config/duration.h>
#include <syncbn/config/options.h>

#include <algorithm>
#include <array>
#include <climits>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

#include "common/words.h"

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

}  // namespace

milliseconds read_time(const std::string& option, const std::string& typed, milliseconds min,
                       milliseconds max) {
  const auto time = config::parse_time(typed);
  if (time && *time >= min && *time <= max) return *time;
  const auto seconds = [](milliseconds one) { return std::chrono::duration<double>(one).count(); };
  throw base::UserError(
      fmt::format("{}={}: expected a time from {:.10g} s to {:.10g} s, in seconds or with a unit, "
                  "as 500ms, 90s, 5m, "
                  "2h, 1d",
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

int read_stdin_rank(const std::string& typed) {
  if (typed == "none") return -1;
  const auto rank = base::parse_number<int>(typed);
  if (rank && *rank >= 0) return *rank;
  throw base::UserError(fmt::format("--stdin={}: expected a rank, or none", typed));
}

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
    const auto number = [&](int min, int max = INT_MAX) {
      const auto read = base::parse_number<int>(value);
      if (read && *read >= min && *read <= max) return *read;
      throw base::UserError(fmt::format("--rdzv_conf={}: {} is a whole number from {}{}, got '{}'",
                                        typed, name, min,
                                        max == INT_MAX ? "" : fmt::format(" to {}", max), value));
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
        {"keep_alive_max_attempt", [&] { options.alive_misses = number(1, kMaxMisses); }},
        {"store_mib", [&] { options.store_mib = number(1, kMaxMib); }},
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

void read_master_addr(LaunchOptions& options) {
  const auto master = base::parse_host_port(options.master_addr);
  if (master && !master->port) options.master_addr = master->host;
}

}  // namespace syncbn::launch

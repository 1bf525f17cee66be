#include "options/head_options.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <array>
#include <chrono>
#include <cstdint>

#include "common/words.h"
#include "options/hosts.h"

namespace syncbn::launch {
namespace {

// Options that --hosts and --hostfile exclude: the list of hosts determines the nodes.
constexpr std::array kPlaceOptions{"--nnodes",       "--node_rank",     "--standalone",
                                   "--rdzv_backend", "--rdzv_endpoint", "--local_addr"};

std::vector<std::string> words_of_option(const std::string& name, const std::string& typed) {
  auto words = shell_words(typed);
  if (!words) throw base::UserError(fmt::format("{}={}: a quote is not closed", name, typed));
  return *words;
}

std::vector<std::string> ssh_command(const TypedOptions& typed) {
  std::vector<std::string> words = words_of_option("--ssh_command", typed.ssh_command);
  if (words.empty()) throw base::UserError("--ssh_command is empty");
  const auto add = [&words](const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
  };
  // ssh uses the first value of an option that is given twice, so the user's come first.
  add(words_of_option("--ssh_options", typed.ssh_options));
  if (typed.ssh_port) add({"-p", std::to_string(*typed.ssh_port)});
  if (!typed.ssh_user.empty()) add({"-l", typed.ssh_user});
  if (!typed.ssh_identity.empty()) add({"-i", typed.ssh_identity});
  // No prompts, no terminal, no forwardings or commands from the user's configuration, and no
  // shared connection, because this one ends with the job. ssh gives up one minute after the host
  // is gone.
  add({"-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none",
       "-o", "ControlMaster=no", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"});
  return words;
}

std::vector<std::string> read_exports(const std::string& typed) {
  std::vector<std::string> words = words_of(typed);
  for (const std::string& word : words) {
    if (is_export_pattern(word)) continue;
    // mpirun -x accepts NAME=VALUE, so users try that here.
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    std::string what_to_do = "expected NAME, PREFIX_* or !NAME";
    if (equals != std::string::npos && is_export_pattern(name)) {
      what_to_do =
          fmt::format("its value comes from the environment: {0}={1} syncbn-launch --export={0} …",
                      name, shell_quoted({word.substr(equals + 1)}));
    }
    throw base::UserError(fmt::format("--export={}: '{}' is not the name of a variable; {}", typed,
                                      word, what_to_do));
  }
  return words;
}

}  // namespace

std::string hosts_option(const CommandLine& line) {
  for (const bool typed : {true, false}) {
    for (const char* name : {"--hosts", "--hostfile"}) {
      if (typed ? line.is_typed(name) : line.has(name)) return name;
    }
  }
  return "";
}

void check_hosts(const TypedOptions& typed, const CommandLine& line) {
  const std::string hosts = hosts_option(line);
  if (hosts.empty()) {
    for (const std::string& name : head_only_options()) {
      if (!line.is_typed(name)) continue;
      throw base::UserError(fmt::format("{} needs --hosts or --hostfile", name));
    }
    return;
  }
  if (line.is_typed("--hosts") && line.is_typed("--hostfile")) {
    throw base::UserError("--hosts and --hostfile exclude each other; --include chooses some");
  }
  if (line.is_typed("--stdin") && typed.stdin_text != "none") {
    throw base::UserError(
        fmt::format("--stdin={} and {} exclude each other: workers on hosts have "
                    "no input",
                    typed.stdin_text, line.source_of(hosts)));
  }
  for (const std::string name : kPlaceOptions) {
    const bool same = name == "--rdzv_backend" && typed.rdzv_backend == "static";
    if (same || !line.is_typed(name)) continue;
    throw base::UserError(fmt::format("{} and {} exclude each other: the hosts are the nodes",
                                      line.source_of(hosts), name));
  }
}

HeadOptions read_head_options(const TypedOptions& typed, const CommandLine& line,
                              std::string_view launcher_name) {
  HeadOptions head;
  head.hosts = choose_hosts(hosts_option(line) == "--hosts" ? read_host_list(typed.hosts)
                                                            : read_host_file(typed.hostfile),
                            typed.include, typed.exclude);
  head.ssh = ssh_command(typed);
  head.ssh_timeout = std::chrono::milliseconds(static_cast<int64_t>(typed.ssh_seconds * 1000));
  head.launcher = typed.ssh_launcher;
  head.ssh_all = typed.ssh_all;
  head.exports = read_exports(typed.exports);
  std::vector<std::string> own = head_only_options();
  own.insert(own.end(), kPlaceOptions.begin(), kPlaceOptions.end());
  own.insert(own.end(), {"--master_addr", "--master_port", "--report", "--dry_run"});
  head.node_options = line.options(own);
  head.launcher_name = launcher_name;
  return head;
}

}  // namespace syncbn::launch

#include "options/hosts.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <regex>
#include <span>
#include <sstream>

#include "common/words.h"
#include "options/command_line.h"
#include "options/option_table.h"

namespace syncbn::launch {
namespace {

// True if ssh does not take the name for an option, and a shell in a ProxyCommand does not
// interpret it.
bool is_harmless(std::string_view name, std::string_view marks) {
  return !name.starts_with('-') && std::ranges::all_of(name, [marks](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || marks.find(c) != marks.npos;
  });
}

// Cuts text for a message: the host file may be a file of another kind.
std::string shown(const std::string& text) {
  constexpr int kColumns = 81;
  return base::shortened(base::printable(text), kColumns);
}

int checked_slots(const std::optional<int>& slots, const std::string& host) {
  if (slots && *slots >= 1 && *slots <= kMaxWorkers) return *slots;
  throw base::UserError(
      fmt::format("{} needs a number of workers (slots) from 1 to {}", host, kMaxWorkers));
}

Host read_host(const std::string& text) {
  Host host;
  // A user name may contain an @.
  const size_t at = text.rfind('@');
  if (at != std::string::npos) host.user = text.substr(0, at);
  const auto parsed = base::parse_host_port(at == std::string::npos ? text : text.substr(at + 1));
  const bool is_host =
      parsed && is_harmless(parsed->host, ".-_:%") && is_harmless(host.user, "._-+@\\") && at != 0;
  if (!is_host) {
    throw base::UserError(
        fmt::format("'{}' is not a host: expected NAME, NAME:SLOTS or USER@NAME, an IPv6 address "
                    "with slots in brackets",
                    shown(text)));
  }
  host.name = parsed->host;
  if (parsed->port) host.slots = checked_slots(parsed->port, text);
  return host;
}

Host read_line(const std::vector<std::string>& words) {
  // mpirun has several names for each: the number of workers, and its bound on more workers.
  constexpr std::array kSlots{"slots", "cpus", "cpu", "count"};
  constexpr std::array kMaxSlots{"max_slots", "max-slots", "slots_max", "slots-max"};
  Host host = read_host(words[0]);
  for (const std::string& word : std::span(words).subspan(1)) {
    const size_t equals = word.find('=');
    const std::string name = equals == word.npos ? "" : word.substr(0, equals);
    if (std::ranges::count(kMaxSlots, name) > 0) continue;
    if (std::ranges::count(kSlots, name) == 0) {
      throw base::UserError(
          fmt::format("expected HOST or HOST slots=N, got '{}'", shown(base::join(words, " "))));
    }
    if (host.slots != 0) {
      throw base::UserError(fmt::format("{} has its number of workers twice", words[0]));
    }
    host.slots = checked_slots(base::parse_number<int>(word.substr(equals + 1)), host.name);
  }
  return host;
}

/// Makes one host of the mentions of each, with the sum of their slots. If there are fewer hosts
/// than mentions, as in the files of PBS and mpirun, a mention without a number is one slot.
std::vector<Host> merged(const std::vector<Host>& mentions) {
  std::vector<Host> hosts;
  for (const Host& one : mentions) {
    const auto former = std::ranges::find(hosts, one.full_name(), &Host::full_name);
    if (former == hosts.end()) {
      hosts.push_back(one);
    } else {
      former->slots = std::max(former->slots, 1) + std::max(one.slots, 1);
    }
  }
  if (hosts.size() == mentions.size()) return hosts;
  for (Host& host : hosts) host.slots = checked_slots(std::max(host.slots, 1), host.full_name());
  return hosts;
}

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

bool is_export_pattern(std::string_view word) {
  if (word.starts_with('!')) word.remove_prefix(1);
  const std::string_view marks = word.find('[') == word.npos ? "_*?" : "_*?[]-";
  return !word.empty() && std::isdigit(static_cast<unsigned char>(word[0])) == 0 &&
         is_harmless(word, marks);
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

std::vector<Host> read_host_list(const std::string& text) {
  std::vector<Host> hosts;
  for (const std::string& word : words_of(text)) {
    try {
      hosts.push_back(read_host(word));
    } catch (const base::UserError& error) {
      throw base::UserError(fmt::format("--hosts={}: {}", base::printable(text), error.what()));
    }
  }
  return merged(hosts);
}

std::vector<Host> read_host_file(const std::filesystem::path& file) {
  std::vector<Host> hosts;
  constexpr size_t kMaxBytes = 1 << 20;
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  static const std::regex kEquals("[ \t]*=[ \t]*");  // mpirun accepts blanks around "="
  std::string all = base::read_file(file, kMaxBytes);
  if (all.starts_with(kByteOrderMark)) all.erase(0, kByteOrderMark.size());
  std::istringstream lines(all);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string entry = line.substr(0, line.find('#'));
    std::istringstream text(std::regex_replace(entry, kEquals, "="));
    std::vector<std::string> words;
    for (std::string word; text >> word;) words.push_back(word);
    if (words.empty()) continue;
    try {
      hosts.push_back(read_line(words));
    } catch (const base::UserError& error) {
      throw base::UserError(
          fmt::format("--hostfile: {}:{}: {}", file.string(), number, error.what()));
    }
  }
  if (hosts.empty()) {
    throw base::UserError(fmt::format("--hostfile: {} names no host", file.string()));
  }
  return merged(hosts);
}

Variables exported_variables(const std::vector<std::string>& more) {
  std::vector<std::string> patterns(kDefaultExports.begin(), kDefaultExports.end());
  patterns.insert(patterns.end(), more.begin(), more.end());
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const std::string name = text.substr(0, text.find('='));
    bool is_exported = false;
    for (const std::string& pattern : patterns) {
      const bool leaves_out = pattern.starts_with('!');
      const char* const fits = pattern.c_str() + (leaves_out ? 1 : 0);
      if (::fnmatch(fits, name.c_str(), 0) == 0) is_exported = !leaves_out;
    }
    if (is_exported && name != text) variables[name] = text.substr(name.size() + 1);
  }
  return variables;
}

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
    const std::vector<std::string> names = line.typed_with(kNeedsHosts);
    if (names.empty()) return;
    throw base::UserError(fmt::format("{} needs --hosts or --hostfile", names.front()));
  }
  if (line.is_typed("--hosts") && line.is_typed("--hostfile")) {
    throw base::UserError("--hosts and --hostfile exclude each other; omit one of them");
  }
  if (line.is_typed("--stdin") && typed.stdin_text != "none") {
    throw base::UserError(
        fmt::format("--stdin={} and {} exclude each other: workers on hosts have no input",
                    typed.stdin_text, line.source_of(hosts)));
  }
  for (const std::string& name : line.typed_with(kExcludesHosts)) {
    if (name == "--rdzv_backend" && typed.rdzv_backend == "static") continue;
    throw base::UserError(fmt::format("{} and {} exclude each other: the hosts are the nodes",
                                      line.source_of(hosts), name));
  }
}

HeadOptions read_head_options(const TypedOptions& typed, const CommandLine& line) {
  return {.hosts = hosts_option(line) == "--hosts" ? read_host_list(typed.hosts)
                                                   : read_host_file(typed.hostfile),
          .ssh = ssh_command(typed),
          .launcher = typed.ssh_launcher,
          .exports = read_exports(typed.exports),
          .node_options = line.options(kNeedsHosts | kExcludesHosts | kKeptByHead)};
}

}  // namespace syncbn::launch

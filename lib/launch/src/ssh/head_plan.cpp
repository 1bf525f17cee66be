#include "ssh/head_plan.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/socket.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "common/words.h"
#include "nodes/master_port.h"
#include "ssh/node_protocol.h"

namespace syncbn::launch {
namespace {

std::string master_addr(const LaunchOptions& options) {
  const std::vector<Host>& hosts = options.head.hosts;
  if (!options.master_addr.empty()) return options.master_addr;
  const bool all_are_here = std::ranges::all_of(hosts, base::is_loopback, &Host::name);
  // On other hosts, a loopback name means those hosts.
  return base::is_loopback(hosts[0].name) && !all_are_here ? base::hostname() : hosts[0].name;
}

std::vector<std::string> start_words(const LaunchOptions& options, const NodePlan& node) {
  if (node.is_here) return {base::program_file().string(), kFromHead};
  std::vector<std::string> words = options.head.ssh;
  const auto timeout = std::chrono::ceil<std::chrono::seconds>(options.head.ssh_timeout).count();
  words.insert(words.end(),
               {"-o", fmt::format("ConnectTimeout={}", timeout), "--", node.host.full_name(),
                fmt::format("exec {} {}", shell_quoted({launcher_on_hosts(options)}), kFromHead)});
  return words;
}

}  // namespace

std::vector<NodePlan> plan_nodes(const LaunchOptions& options) {
  const HeadOptions& head = options.head;
  const int port = options.master_port.value_or(0);
  std::vector<NodePlan> nodes;
  for (const Host& host : head.hosts) {
    const size_t rank = nodes.size();
    NodePlan& node = nodes.emplace_back();
    node.host = host;
    node.is_here = host.user.empty() && is_local_address(host.name);
    node.start = start_words(options, node);
    std::vector<std::string>& words = node.words = {options.called_as};
    words.insert(words.end(), head.node_options.begin(), head.node_options.end());
    if (host.slots != 0) words.push_back(fmt::format("--nproc_per_node={}", host.slots));
    words.push_back(fmt::format("--nnodes={}", head.hosts.size()));
    words.push_back(fmt::format("--node_rank={}", rank));
    words.push_back(fmt::format("--local_addr={}", host.name));
    const bool needs_master = head.hosts.size() > 1 || !options.master_addr.empty();
    if (needs_master) words.push_back("--master_addr=" + master_addr(options));
    if (port != 0) words.push_back(fmt::format("--master_port={}", port));
    words.emplace_back("--");
    words.insert(words.end(), options.program.begin(), options.program.end());
  }
  return nodes;
}

std::string launcher_on_hosts(const LaunchOptions& options) {
  const std::string& launcher = options.head.launcher;
  return launcher.empty() ? base::program_file().string() : launcher;
}

std::string render(const std::vector<NodePlan>& nodes, const Variables& exported) {
  const std::string folder = std::filesystem::current_path();
  std::string text;
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    const NodePlan& node = nodes[rank];
    std::vector<std::string> words;
    if (!node.is_here) words.emplace_back("env");
    for (const auto& [name, value] : node.environment(exported))
      words.push_back(fmt::format("{}={}", name, value));
    words.insert(words.end(), node.words.begin(), node.words.end());
    text += fmt::format("# node {}, on {}{}: {}\ncd {} && {}\n", rank, node.host.full_name(),
                        node.is_here ? " (this machine)" : "", shell_quoted(node.start),
                        shell_quoted({folder}), shell_quoted(words));
  }
  return text;
}

}  // namespace syncbn::launch

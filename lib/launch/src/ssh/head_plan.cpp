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
#include "options/hosts.h"
#include "ssh/node_protocol.h"

namespace syncbn::launch {

HeadPlan::HeadPlan(const LaunchOptions& options)
    : options_(options), exported_(exported_variables(options.head.exports)) {
  for (const Host& host : hosts()) {
    is_here_.push_back(host.user.empty() && is_local_address(host.name));
  }
}

std::string HeadPlan::launcher() const {
  return options_.head.launcher.empty() ? base::program_file().string() : options_.head.launcher;
}

std::string HeadPlan::master_addr() const {
  const std::string& first = hosts().front().name;
  if (!options_.master_addr.empty()) return options_.master_addr;
  const bool all_are_here = std::ranges::all_of(hosts(), base::is_loopback, &Host::name);
  // On other hosts, a loopback name means those hosts.
  return base::is_loopback(first) && !all_are_here ? base::hostname() : first;
}

std::vector<std::string> HeadPlan::start_words(size_t node) const {
  if (is_here(node)) return {base::program_file().string(), kFromHead};
  std::vector<std::string> words = options_.head.ssh;
  const auto timeout = std::chrono::ceil<std::chrono::seconds>(options_.head.ssh_timeout).count();
  words.insert(words.end(),
               {"-o", fmt::format("ConnectTimeout={}", timeout), "--", hosts()[node].full_name(),
                fmt::format("exec {} {}", shell_quoted({launcher()}), kFromHead)});
  return words;
}

std::vector<std::string> HeadPlan::node_words(size_t node) const {
  const Host& host = hosts()[node];
  std::vector<std::string> words{options_.head.launcher_name};
  const auto& given = options_.head.node_options;
  words.insert(words.end(), given.begin(), given.end());
  if (host.slots != 0) words.push_back(fmt::format("--nproc_per_node={}", host.slots));
  words.push_back(fmt::format("--nnodes={}", hosts().size()));
  words.push_back(fmt::format("--node_rank={}", node));
  words.push_back(fmt::format("--local_addr={}", host.name));
  const bool needs_master = hosts().size() > 1 || !options_.master_addr.empty();
  if (needs_master) words.push_back(fmt::format("--master_addr={}", master_addr()));
  const int port = options_.master_port.value_or(0);
  if (port != 0) words.push_back(fmt::format("--master_port={}", port));
  words.emplace_back("--");
  words.insert(words.end(), options_.program.begin(), options_.program.end());
  return words;
}

std::string HeadPlan::render() const {
  const std::string folder = std::filesystem::current_path();
  std::string text;
  for (size_t node = 0; node < hosts().size(); ++node) {
    text += fmt::format("# node {}, on {}{}: {}\n", node, hosts()[node].full_name(),
                        is_here(node) ? " (this machine)" : "", shell_quoted(start_words(node)));
    std::vector<std::string> words = node_words(node);
    if (!is_here(node)) {
      std::vector<std::string> variables{"env"};
      for (const auto& [name, value] : environment(node)) {
        variables.push_back(fmt::format("{}={}", name, value));
      }
      words.insert(words.begin(), variables.begin(), variables.end());
    }
    text += fmt::format("cd {} && {}\n", shell_quoted({folder}), shell_quoted(words));
  }
  return text;
}

}  // namespace syncbn::launch

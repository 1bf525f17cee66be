#include "workers/plan.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "common/words.h"
#include "job/environment.h"

namespace syncbn::launch {
namespace {

std::string ranks(int first, int count) {
  if (count == 1) return fmt::format("rank {}", first);
  return fmt::format("ranks {} to {}", first, first + count - 1);
}

std::string node_comment(const LaunchOptions& options, const RunContext& context) {
  const int workers = options.nproc_per_node;
  std::string line = fmt::format("# node {} of {}, host {}: {}, {} of {}", context.node,
                                 context.nodes, base::hostname(), base::counted(workers, "worker"),
                                 ranks(context.ranks.base, workers), context.ranks.world_size);
  if (context.nodes > 1) {
    line += fmt::format(" (if {} nodes take part, each with --nproc_per_node={} as this one{})",
                        context.nodes, workers,
                        options.node_rank < 0 ? ", which is taken for the first" : "");
  }
  return line + "\n";
}

std::string assignments(const Variables& variables) {
  std::string text;
  for (const auto& [name, value] : variables) {
    text += fmt::format("{}={} ", name, shell_quoted({value}));
  }
  return text;
}

// The variables that have the same value for all workers.
Variables common_to(const std::vector<Variables>& workers) {
  Variables common = workers.front();
  for (const Variables& variables : workers) {
    std::erase_if(common,
                  [&](const auto& entry) { return variables.at(entry.first) != entry.second; });
  }
  return common;
}

}  // namespace

std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command) {
  std::vector<Variables> workers;
  workers.reserve(static_cast<size_t>(options.nproc_per_node));
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    workers.push_back(worker_variables(options, context, local_rank));
  }
  const Variables common = common_to(workers);
  std::string text = node_comment(options, context);
  text += "export " + assignments(common);
  text.back() = '\n';
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    const auto index = static_cast<size_t>(local_rank);
    Variables own;
    std::set_difference(workers[index].begin(), workers[index].end(), common.begin(), common.end(),
                        std::inserter(own, own.end()));
    std::vector<std::string> argv = worker_argv(command, local_rank);
    argv.front() = command.file;
    text += fmt::format("# rank {}, local rank {}", context.ranks.base + local_rank, local_rank);
    if (!context.cpus.empty()) {
      const std::string cpus = format_cpus(context.cpus[index]);
      text += ", CPU " + cpus;
      argv.insert(argv.begin(), {"taskset", "-c", cpus});
    }
    text += fmt::format("\n{}{}\n", assignments(own), shell_quoted(argv));
  }
  return text;
}

}  // namespace syncbn::launch

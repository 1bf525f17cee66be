#include "workers/plan.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>

#include <vector>

#include "common/words.h"

namespace syncbn::launch {
namespace {

std::string node_comment(const LaunchOptions& options, const RunContext& context) {
  const int workers = options.nproc_per_node;
  const int first = context.ranks.base;
  const std::string ranks = workers == 1
                                ? fmt::format("rank {}", first)
                                : fmt::format("ranks {} to {}", first, first + workers - 1);
  std::string line = fmt::format("# node {} of {}, host {}: {}, {} of {}", context.node,
                                 context.nodes, base::hostname(), base::counted(workers, "worker"),
                                 ranks, context.ranks.world_size);
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

}  // namespace

std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command) {
  const int nproc = options.nproc_per_node;
  Variables common = worker_variables(options, context, 0);
  for (int local_rank = 1; local_rank < nproc; ++local_rank) {
    const Variables other = worker_variables(options, context, local_rank);
    std::erase_if(common, [&](const auto& entry) { return other.at(entry.first) != entry.second; });
  }
  std::string text = node_comment(options, context) + "export " + assignments(common);
  text.back() = '\n';
  for (int local_rank = 0; local_rank < nproc; ++local_rank) {
    Variables own = worker_variables(options, context, local_rank);
    std::erase_if(own, [&](const auto& entry) { return common.contains(entry.first); });
    std::vector<std::string> argv = worker_argv(command, local_rank);
    argv.front() = command.file;
    text += fmt::format("# rank {}, local rank {}", context.ranks.base + local_rank, local_rank);
    if (!context.cpus.empty()) {
      const std::string cpus = format_cpus(context.cpus[static_cast<size_t>(local_rank)]);
      text += ", CPU " + cpus;
      argv.insert(argv.begin(), {"taskset", "-c", cpus});
    }
    text += fmt::format("\n{}{}\n", assignments(own), shell_quoted(argv));
  }
  return text;
}

}  // namespace syncbn::launch

#include "options/option_help.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>
#include <syncbn/config/help_lines.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "options/option_table.h"

namespace syncbn::launch {
namespace {

constexpr const char* kAllOptions = "all";  // the topic of every option

constexpr const char* kSummary =
    "Starts the workers of a distributed training run on this machine and stays with them to their "
    "end.";

// What holds for all options.
constexpr const char* kNotes =
    "Everything after the program's name goes to the program, with $local_rank and ${local_rank} "
    "replaced, and $$ by $. NAME.py runs as python3 -u, where python3 is $PYTHON_EXEC, or stands "
    "beside the link by which the launcher was called, or in PATH; another name without a slash is "
    "looked for beside syncbn-launch, then in PATH. Options may be written with dashes, and "
    "shortened as long as they stay unambiguous. Under srun or mpirun, one launcher per node, and "
    "in indexed Kubernetes jobs nodes, node rank and master are taken from the environment unless "
    "given.";

struct Example {
  const char* what;
  const char* command;
  bool is_short = false;  ///< whether the help of the most used options shows it
};

constexpr std::array kExamples{
    Example{"Four workers on this machine, with the trainer that stands beside syncbn-launch",
            "syncbn-launch --standalone --nproc_per_node=4 train --config configs/digits.yaml",
            true},
    Example{
        "One worker per GPU, with a Python script, started again up to three times when a worker "
        "fails",
        "syncbn-launch --nproc_per_node=gpu --max_restarts=3 train.py --epochs 10"},
    Example{
        "The second of two machines, eight workers each",
        "syncbn-launch --nnodes=2 --node_rank=1 --master_addr=node0 --nproc_per_node=8 train.py"},
    Example{"Four workers on each of two machines, started from here",
            "syncbn-launch -H node0:4,node1:4 train.py", true},
    Example{"Every worker's output in files, that of rank 0 on the terminal as well",
            "syncbn-launch --nproc_per_node=4 --log_dir=logs -r 3 -t 0:3 train.py"},
    Example{"What every rank of the jobs on this machine does now, on all their nodes",
            "syncbn-launch status", true},
    Example{"Which ranks did not come to which collectives, from the file that a failed job names",
            "syncbn-launch explain FILE"},
};

/// The word that names the option's group in --help WORD: "nodes", "ssh".
std::string topic_of(const config::FieldInfo& option) {
  const std::string& name = option.group;
  std::string word = name.ends_with("ssh") ? "ssh" : name.substr(0, name.find(' '));
  word.front() = static_cast<char>(std::tolower(word.front()));
  return word;
}

/// The options that most jobs need, in a clause each, and where the others are.
std::string most_used(size_t columns) {
  std::vector<config::FieldInfo> shown;
  std::vector<std::pair<std::string, std::vector<std::string>>> others;  // by topic
  for (config::FieldInfo option : option_fields()) {
    const std::string topic = topic_of(option);
    if (others.empty() || others.back().first != topic) others.push_back({topic, {}});
    if ((option.tags & kMostUsed) == 0) {
      others.back().second.push_back("--" + option.path);
      continue;
    }
    for (const char* end : {"; ", ": "})
      option.help.resize(std::min(option.help.find(end), option.help.size()));
    option.environment.clear();
    option.group = "The most used options";
    shown.push_back(std::move(option));
  }
  std::string text = config::option_lines(shown, columns);
  text += "\nThe others, with one of these words after --help:\n";
  text += fmt::format("  {:<10}{}\n", kAllOptions, "every option, with its variable, and examples");
  for (auto& [topic, names] : others) {
    constexpr size_t kNamed = 3;
    const size_t more = names.size() - std::min(names.size(), kNamed);
    names.resize(names.size() - more);
    text += fmt::format("  {:<10}{}{}\n", topic, base::join(names, ", "),
                        more > 0 ? fmt::format(" and {} more", more) : "");
  }
  text += "\nExamples:\n";
  for (const Example& example : kExamples) {
    if (example.is_short) text += fmt::format("  {}\n", example.command);
  }
  return text;
}

}  // namespace

std::string help_text(std::string topic) {
  const auto columns = static_cast<size_t>(std::clamp(base::terminal_columns(), 50, 80));
  std::ranges::replace(topic, '-', '_');
  std::vector<config::FieldInfo> of_topic;
  for (const config::FieldInfo& option : option_fields()) {
    if (option.path == topic || topic_of(option) == topic) of_topic.push_back(option);
  }
  if (!of_topic.empty()) {
    const std::string text = config::option_lines(of_topic, columns);
    const bool is_group = of_topic.front().path != topic;
    return text.substr(is_group ? 1 : text.find(":\n") + 2);
  }
  const std::string head =
      fmt::format("{}\n\nUsage: {}\n", config::wrapped(kSummary, 0, columns), kUsage);
  if (topic != kAllOptions) return head + most_used(columns);
  std::string text =
      fmt::format("{}{}\n{}\n\nExamples:\n", head, config::option_lines(option_fields(), columns),
                  config::wrapped(kNotes, 0, columns));
  for (const Example& example : kExamples) {
    text += fmt::format("  {}:\n    {}\n", config::wrapped(example.what, 2, columns - 1),
                        example.command);
  }
  return text;
}

std::string completion(const std::string& shell) {
  std::string names;
  for (const config::FieldInfo& option : option_fields()) names += " --" + option.path;
  if (shell == "zsh") {
    return fmt::format(
        "#compdef syncbn-launch\n_alternative 'options:option:({})' 'files:file:_files'\n", names);
  }
  return fmt::format("complete -o bashdefault -o default -W '{}' syncbn-launch\n", names);
}

}  // namespace syncbn::launch

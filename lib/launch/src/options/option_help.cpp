#include "options/option_help.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/wrapped.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <utility>

#include "job/run_context.h"

namespace syncbn::launch {
namespace {

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

// The entries of all options, with a heading before each group.
template <class Heading, class Entry>
std::string by_group(const std::vector<config::FieldInfo>& options, Heading heading, Entry entry) {
  std::string text;
  std::string group;
  for (const config::FieldInfo& option : options) {
    if (option.group != group) text += heading(option.group);
    group = option.group;
    text += entry(option);
  }
  return text;
}

/// The groups in order, by the words that name them in --help WORD.
std::vector<std::pair<std::string, std::vector<config::FieldInfo>>> groups_of(
    const std::vector<config::FieldInfo>& options) {
  std::vector<std::pair<std::string, std::vector<config::FieldInfo>>> groups;
  for (const config::FieldInfo& option : options) {
    const std::string& name = option.group;
    std::string word = name.ends_with("ssh") ? "ssh" : name.substr(0, name.find(' '));
    word.front() = static_cast<char>(std::tolower(word.front()));
    if (groups.empty() || groups.back().first != word) groups.push_back({word, {}});
    groups.back().second.push_back(option);
  }
  return groups;
}

constexpr size_t kColumn = 28;  // where the help of an option begins

// "  -r,--redirects STREAMS    Streams ... (default 0, environment PET_REDIRECTS)".
std::string help_entry(const config::FieldInfo& option, size_t columns) {
  std::string name = "  " + option.letter + (option.letter.empty() ? "--" : ",--") + option.path;
  if (!option.value_name.empty()) name += " " + option.value_name;
  const std::string indent(kColumn, ' ');
  name = name.size() < kColumn ? fmt::format("{:<{}}", name, kColumn) : name + "\n" + indent;

  std::vector<std::string> notes;
  if (!option.default_value.empty()) notes.push_back("default " + option.default_value);
  if (!option.environment.empty()) notes.push_back("environment " + option.environment.front());
  std::string help = option.help;
  if (!notes.empty()) help += fmt::format(" ({})", base::join(notes, ", "));
  return name + config::wrapped(help, kColumn, columns) + "\n";
}

constexpr std::array kMostUsed{"nproc_per_node", "standalone", "nnodes", "hosts",
                               "max_restarts",   "log_dir",    "dry_run"};

/// The options that most jobs need, in a clause each, and where the others are.
std::string most_used(const std::vector<config::FieldInfo>& options, size_t columns) {
  const auto is_most_used = [](const config::FieldInfo& option) {
    return std::ranges::count(kMostUsed, option.path) > 0;
  };
  std::string text = "\nThe most used options:\n";
  for (config::FieldInfo option : options) {
    if (!is_most_used(option)) continue;
    for (const char* end : {"; ", ": "})
      option.help.resize(std::min(option.help.find(end), option.help.size()));
    option.environment.clear();
    text += help_entry(option, columns);
  }
  text += "\nThe others, with one of these words after --help:\n";
  text += fmt::format("  {:<10}{}\n", kAllOptions, "every option, with its variable, and examples");
  for (const auto& [word, group] : groups_of(options)) {
    std::vector<std::string> names;
    for (const config::FieldInfo& option : group) {
      if (!is_most_used(option)) names.push_back("--" + option.path);
    }
    constexpr size_t kNamed = 3;
    const size_t more = names.size() - std::min(names.size(), kNamed);
    names.resize(names.size() - more);
    text += fmt::format("  {:<10}{}{}\n", word, base::join(names, ", "),
                        more > 0 ? fmt::format(" and {} more", more) : "");
  }
  text += "\nExamples:\n";
  for (const Example& example : kExamples) {
    if (example.is_short) text += fmt::format("  {}\n", example.command);
  }
  return text;
}

// Escapes text for troff: dashes stay ASCII, so that they can be copied, and no line is taken for a
// request.
std::string escaped(std::string_view text) {
  std::string result;
  bool at_line_start = true;
  for (const char c : text) {
    if (at_line_start && (c == '.' || c == '\'')) result += "\\&";
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
    at_line_start = c == '\n';
  }
  return result;
}

std::string bold(std::string_view text) {
  return fmt::format("\\fB{}\\fR", escaped(text));
}

std::string man_entry(const config::FieldInfo& option) {
  std::string tag = option.letter.empty() ? "" : bold(option.letter) + ", ";
  tag += bold("--" + option.path);
  if (!option.value_name.empty()) tag += fmt::format(" \\fI{}\\fR", escaped(option.value_name));
  std::string text = fmt::format(".TP\n{}\n{}.\n", tag, escaped(option.help));
  if (!option.default_value.empty()) {
    text += fmt::format("Default: {}.\n", escaped(option.default_value));
  }
  if (!option.environment.empty()) {
    text += fmt::format("Environment: {}.\n", option.environment.front());
  }
  return text;
}

std::string exit_status() {
  std::string text =
      "That of the first worker that failed, on whatever node, or one of the launcher's own:\n";
  const auto line = [&text](const auto& code, const char* meaning) {
    text += fmt::format(".TP\n.B {}\n{}\n", code, meaning);
  };
  line(int{base::kExitOk}, "All went well.");
  line(int{base::kExitUsage}, "A mistake in the command line.");
  line(int{base::kExitInternal}, "A bug in the launcher.");
  line(int{base::kExitUnavailable},
       "Another node, the network or a disk failed; starting again may help.");
  line(int{base::kExitCannotExecute}, "The program cannot be executed.");
  line(int{base::kExitNotFound}, "The program was not found.");
  line(fmt::format("{}+N", int{base::kExitSignalBase}), "Ended by signal N.");
  return text;
}

std::string worker_environment() {
  std::vector<std::string> names;
  for (const auto& [name, value] : worker_variables({}, {}, 0)) names.push_back(name);
  return fmt::format(
      "Options name the variables that stand for them; the command line comes first.\n"
      ".PP\nWorkers find, besides what the launcher's own environment holds:\n{}.\n",
      base::join(names, ",\n"));
}

}  // namespace

std::vector<std::string> help_topics(const std::vector<config::FieldInfo>& options) {
  std::vector<std::string> topics = {kAllOptions};
  for (const auto& [word, group] : groups_of(options)) topics.push_back(word);
  return topics;
}

std::string help_text(const std::vector<config::FieldInfo>& options, std::string topic) {
  const auto columns = static_cast<size_t>(std::clamp(base::terminal_columns(), 50, 80));
  const auto heading = [](const std::string& group) { return fmt::format("\n{}:\n", group); };
  const auto entry = [&](const config::FieldInfo& option) { return help_entry(option, columns); };
  std::ranges::replace(topic, '-', '_');
  for (const config::FieldInfo& option : options) {
    if (option.path == topic) return entry(option);
  }
  const auto groups = groups_of(options);
  for (const auto& [word, group] : groups) {
    if (word == topic) return by_group(group, heading, entry).substr(1);
  }
  const std::string head =
      fmt::format("{}\n\nUsage: {}\n", config::wrapped(kSummary, 0, columns), kUsage);
  if (topic != kAllOptions) return head + most_used(options, columns);
  std::string text = fmt::format("{}{}\n{}\n\nExamples:\n", head, by_group(options, heading, entry),
                                 config::wrapped(kNotes, 0, columns));
  for (const Example& example : kExamples) {
    text += fmt::format("  {}:\n    {}\n", config::wrapped(example.what, 2, columns - 1),
                        example.command);
  }
  return text;
}

std::string man_page(const std::vector<config::FieldInfo>& options) {
  const auto heading = [](const std::string& group) {
    return fmt::format(".SS {}\n", escaped(group));
  };
  std::string text =
      fmt::format(".TH SYNCBN\\-LAUNCH 1 \"\" \"syncbn " SYNCBN_VERSION
                  "\" \"User Commands\"\n"
                  ".nh\n.ad l\n"  // do not hyphenate names
                  ".SH NAME\nsyncbn\\-launch \\- start the workers of a distributed training run\n"
                  ".SH SYNOPSIS\n{}\n"
                  ".SH DESCRIPTION\n{}\n.PP\n{}\n"
                  ".SH OPTIONS\n{}.SH EXIT STATUS\n{}.SH ENVIRONMENT\n{}.SH EXAMPLES\n",
                  escaped(kUsage), escaped(kSummary), escaped(kNotes),
                  by_group(options, heading, man_entry), exit_status(), worker_environment());
  for (const Example& example : kExamples) {
    text += fmt::format(".PP\n{}:\n.PP\n.RS 4\n.nf\n{}\n.fi\n.RE\n", escaped(example.what),
                        escaped(example.command));
  }
  return text;
}

}  // namespace syncbn::launch

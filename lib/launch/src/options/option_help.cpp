#include "options/option_help.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

namespace syncbn::launch {
namespace {

constexpr size_t kColumn = 28;  // where the help of an option begins

// "  -r,--redirects STREAMS    Streams ..." and "(default 0, environment PET_REDIRECTS)".
std::string help_entry(const config::FieldInfo& option) {
  std::string name = "  " + option.letter + (option.letter.empty() ? "--" : ",--") + option.path;
  if (!option.value_name.empty()) name += " " + option.value_name;
  const std::string indent(kColumn, ' ');
  name = name.size() < kColumn ? fmt::format("{:<{}}", name, kColumn) : name + "\n" + indent;

  std::vector<std::string> notes;
  if (!option.default_value.empty()) notes.push_back("default " + option.default_value);
  if (!option.environment.empty()) notes.push_back("environment " + option.environment.front());
  std::string help = option.help;
  if (!notes.empty()) help += fmt::format("\n({})", base::join(notes, ", "));
  for (size_t end = help.find('\n'); end != help.npos; end = help.find('\n', end + 1)) {
    help.insert(end + 1, indent);
  }
  return name + help + "\n";
}

}  // namespace

const char* const kNotes =
    R"(Everything after the program's name goes to the program, with $local_rank and ${local_rank}
replaced, and $$ by $. NAME.py runs as python3 -u, where python3 is $PYTHON_EXEC, or stands beside
the link by which the launcher was called, or in PATH; another name without a slash is looked for beside
syncbn-launch, then in PATH. Options may be written with dashes, and shortened as
long as they stay unambiguous. Under srun or mpirun, one launcher a node, and in indexed Kubernetes jobs
nodes, node rank and master are taken from the environment unless given.)";

std::vector<Example> examples() {
  return {
      {"Four workers on this machine, with the trainer that stands beside syncbn-launch",
       "syncbn-launch --standalone --nproc_per_node=4 train --config configs/digits.yaml"},
      {"One worker per GPU, with a Python script, started again up to three times when a worker "
       "fails",
       "syncbn-launch --nproc_per_node=gpu --max_restarts=3 train.py --epochs 10"},
      {"The second of two machines, eight workers each",
       "syncbn-launch --nnodes=2 --node_rank=1 --master_addr=node0 --nproc_per_node=8 train.py"},
      {"Four workers on each of two machines, started from here",
       "syncbn-launch -H node0:4,node1:4 train.py"},
      {"Every worker's output in files, that of rank 0 on the terminal as well",
       "syncbn-launch --nproc_per_node=4 --log_dir=logs -r 3 -t 0:3 train.py"},
  };
}

std::string help_text(const std::vector<config::FieldInfo>& options) {
  std::string text = fmt::format("{}\n\nUsage: {}\n", kSummary, kUsage);
  std::string group;
  for (const config::FieldInfo& option : options) {
    if (option.group != group) text += fmt::format("\n{}:\n", option.group);
    group = option.group;
    text += help_entry(option);
  }
  text += fmt::format("\n{}\n\nExamples:\n", kNotes);
  for (const Example& example : examples()) {
    text += fmt::format("  {}:\n    {}\n", example.what, example.command);
  }
  return text;
}

}  // namespace syncbn::launch

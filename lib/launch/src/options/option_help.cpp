#include "options/option_help.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace syncbn::launch {
namespace {

bool is_flag(const CLI::Option& option) {
  return option.get_type_size() == 0 || option.get_expected_min() == 0;
}

OptionFacts facts_of(const CLI::Option& option, const std::vector<OptionSource>& sources) {
  OptionFacts facts;
  facts.name = "--" + option.get_lnames().front();
  if (!option.get_snames().empty()) facts.letter = "-" + option.get_snames().front();
  if (!is_flag(option)) facts.type = option.get_type_name();
  facts.help = option.get_description();
  facts.group = option.get_group();
  facts.default_value = option.get_default_str();
  const auto source = std::find_if(sources.begin(), sources.end(),
                                   [&](const OptionSource& one) { return one.name == facts.name; });
  if (source != sources.end() && !source->environment.empty()) {
    facts.environment = source->environment.front();
  }
  return facts;
}

// "  --nnodes N      Number of machines" + "(default 1, environment PET_NNODES)".
class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::vector<OptionSource> sources) : sources_(std::move(sources)) {
    column_width(28);
  }

  std::string make_usage(const CLI::App*, std::string) const override {
    return fmt::format("\nUsage: {}\n\n", kUsage);
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    // CLI11 puts empty lines both before and between groups.
    return CLI::Formatter::make_group(std::move(group), is_positional, std::move(options))
        .substr(1);
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = facts_of(*option, sources_).type;
    return type.empty() ? "" : " " + type;
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    const OptionFacts facts = facts_of(*option, sources_);
    std::vector<std::string> notes;
    if (!facts.default_value.empty()) notes.push_back("default " + facts.default_value);
    if (!facts.environment.empty()) notes.push_back("environment " + facts.environment);
    if (notes.empty()) return facts.help;
    return fmt::format("{}\n({})", facts.help, base::join(notes, ", "));
  }

 private:
  std::vector<OptionSource> sources_;
};

std::string footer() {
  std::string text = std::string(notes()) + "\n\nExamples:";
  for (const Example& example : examples()) {
    text += fmt::format("\n  {}:\n    {}", example.what, example.command);
  }
  return text;
}

}  // namespace

const char* notes() {
  return R"(Everything after the program's name goes to the program, with $local_rank and ${local_rank}
replaced, and $$ by $. NAME.py runs as python3 -u, where python3 is $PYTHON_EXEC, or stands beside
the link by which the launcher was called, or in PATH; another name without a slash is looked for beside
syncbn-launch, then in PATH. Options may be written with dashes, and shortened as
long as they stay unambiguous. Under srun or mpirun, one launcher a node, and in indexed Kubernetes jobs
nodes, node rank and master are taken from the environment unless given.)";
}

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

std::vector<OptionFacts> option_facts(const CLI::App& app,
                                      const std::vector<OptionSource>& sources) {
  std::vector<OptionFacts> facts;
  for (const CLI::Option* option : app.get_options()) facts.push_back(facts_of(*option, sources));
  return facts;
}

void describe_help(CLI::App& app, const std::vector<OptionSource>& sources) {
  app.formatter(std::make_shared<HelpFormatter>(sources));
  app.footer(footer());
}

}  // namespace syncbn::launch

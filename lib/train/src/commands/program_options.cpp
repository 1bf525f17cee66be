#include "commands/program_options.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/text.h>
#include <syncbn/config/help_lines.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <utility>

#include "commands/launching.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

struct CommandHelp {
  std::string name;
  std::string usage;
  std::string summary;
};

const std::array kCommands = {
    CommandHelp{kTraining, "train [--nproc_per_node N] --config FILE [--KEY VALUE]...",
                "Trains the network that a configuration describes. Every key of the configuration "
                "can be\nset on the command line as well: --epochs 3 --optimizer.lr=0.05 "
                "--optimizer.type adamw"},
    CommandHelp{"check", "train check --config FILE [--KEY VALUE]...",
                "Reads the weights and all samples, and names samples that a run could not use.\n"
                "Warns of batches of one sample, and of a warm-up as long as the run."},
    CommandHelp{"eval", "train eval runs/NAME [--split test] [--tables FOLDER] [--KEY VALUE]...",
                "Evaluates a checkpoint: resume=FILE, or the newest run's best.pt or last.pt."},
    CommandHelp{"predict", "train predict IMAGES runs/NAME [--output FOLDER]",
                "Asks a checkpoint's network about image files: a folder of them, or one. Writes "
                "classes, boxes\nor masks."},
    CommandHelp{"export", "train export runs/NAME [--format onnx] [--KEY VALUE]...",
                "Writes a checkpoint's network to a file for other programs."},
    CommandHelp{"sweep",
                "train sweep --config FILE optimizer.lr=0.05,0.1 seed=0..2 [--KEY VALUE]...",
                "Makes a run for each combination of values, one after the other, and a table of "
                "them."},
    CommandHelp{"report", "train report runs/NAME...",
                "Writes the page report.html into each run's folder. Training does so as well."},
    CommandHelp{"compare", "train compare runs/NAME... [--html FILE]",
                "Prints a table of runs, the best first, with the keys that differ."},
    CommandHelp{"profile", "train profile runs/NAME [--steps 3]",
                "Records some steps of a run that is under way, and prints where their time went."},
    CommandHelp{"watch", "train watch runs/NAME",
                "Shows a run's progress and curves until it ends, from any terminal of its host."},
};
constexpr const char* kLauncherUsage =
    "syncbn-launch --nproc_per_node=4 train --config FILE [--KEY VALUE]...";

/// An option, and the commands that take it.
struct CommandOption {
  /// @param spelling "config FILE"; "list [KIND]": the value may be left out; "version": a switch
  /// @param help empty: not listed in --help
  /// @param commands empty: all
  CommandOption(const std::string& spelling, const std::string& help,
                std::vector<std::string> commands, std::vector<std::string> choices = {})
      : commands(std::move(commands)) {
    const size_t end = std::min(spelling.find(' '), spelling.size());
    option.path = spelling.substr(0, end);
    option.value_name = spelling.substr(std::min(end + 1, spelling.size()));
    option.type = option.value_name.empty() ? "true|false" : "list of text";  // keeps all values
    option.help = help;
    option.choices = std::move(choices);
    option.group = "Options";
    option.letter = option.path == "help" ? "-h" : "";
  }

  config::FieldInfo option;
  std::vector<std::string> commands;
};

const std::vector<CommandOption>& all_options() {
  static const std::vector<CommandOption> options = {
      {"config FILE",
       "the configuration, in YAML; of several, each is written over the former",
       {kTraining, "check", "eval", "predict", "export", "sweep"}},
      {"print_config",
       "print all keys, where each value was written, and exit",
       {kTraining, "eval", "predict"}},
      {"list [KIND]",
       "print what there is to choose from, with its options, and exit: models, data, "
       "transforms, losses, metrics, tasks, optimizers, schedules or samplers; without a kind, "
       "the names of all",
       {kTraining}},
      {"print_reference", "print all keys as a Markdown document and exit", {kTraining}},
      {"print_schema", "print all keys as a JSON Schema, for editors, and exit", {kTraining}},
      {"nproc_per_node N",
       "start N ranks by syncbn-launch (auto: one for each GPU, or core); takes also its "
       "--nnodes, --node_rank, --master_addr and --master_port",
       {kTraining, "eval", "predict", "sweep"}},
      {"dry_run", "take a few steps, tell what the run would cost, and exit", {kTraining}},
      {"split SPLIT",
       "the samples to evaluate on: train, val or test",
       {"eval"},
       {"train", "val", "test"}},
      {"tables FOLDER",
       "the folder to write tables of the results to, such as confusion.csv",
       {"eval"}},
      {"format FORMAT",
       "torch, safetensors, torchscript or onnx; default: by the ending of --output (.pth, "
       ".safetensors, .pt or .onnx), and torchscript without one",
       {"export"}},
      {"output PATH",
       "the file that export writes (in a folder, and beside the checkpoint if not given, "
       "NAME.pth, .safetensors, .pt or .onnx), or the folder that predict writes to "
       "(predictions)",
       {"export", "predict"}},
      {"ema", "take the moving average of the weights", {"export", "predict"}},
      {"steps N", "how many steps to record; without it 3", {"profile"}},
      {"html FILE", "write a page as well, with the curves over each other", {"compare"}},
      {"color WHEN",
       "colours in messages: auto (the default; on a terminal, unless NO_COLOR is set), always or "
       "never",
       {kTraining, "eval", "predict", "watch"},
       {"auto", "always", "never"}},
      {"help [NAME]",
       "print this text, or explain a command, an option, a key or a section, and exit; keys: "
       "list all keys",
       {}},
      {"version", "print the version and exit", {kTraining}},
      {"print_help_texts", "", {kTraining}},
      // torch.distributed.launch passes it. LOCAL_RANK has the same value.
      {"local_rank N", "", {}},
  };
  return options;
}

bool is_for(const CommandOption& option, const std::string& command) {
  return option.commands.empty() || std::ranges::count(option.commands, command) > 0;
}

/// "train eval, train predict"
std::string commands_text(const CommandOption& option) {
  std::vector<std::string> texts;
  for (const std::string& command : option.commands) {
    texts.push_back(command == kTraining ? command : "train " + command);
  }
  return base::join(texts, ", ");
}

template <class Condition>
std::vector<config::FieldInfo> options_where(const Condition& holds) {
  std::vector<config::FieldInfo> options;
  for (const CommandOption& one : all_options()) {
    if (holds(one)) options.push_back(one.option);
  }
  return options;
}

/// The options in --help.
std::string options_text(const std::string& command) {
  return config::option_lines(options_where(
      [&](const CommandOption& one) { return is_for(one, command) && !one.option.help.empty(); }));
}

/// Whether a name is a key or a section, including those of one type only.
bool is_key(const std::string& name) {
  return std::ranges::any_of(config_fields(), [&](const config::FieldInfo& field) {
    return field.path == name || field.path.starts_with(name + ".");
  });
}

/// Whether a word is a run's folder or a YAML file, given without --config.
bool is_configuration(const std::string& word) {
  const std::filesystem::path path = word;
  if (word.starts_with('-') || !base::exists(path)) return false;
  return path.extension() == ".yaml" || path.extension() == ".yml" || run_files::is_run(path);
}

/// What a path given as a configuration is instead: "is a folder of data, no run".
std::string describe_path(const std::filesystem::path& path) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    if (!entry.is_directory(ignored)) continue;
    if (entry.path().filename() == "train") return "is a folder of data, no run";
    if (run_files::is_run(entry.path())) {
      return fmt::format("holds runs, such as {}, and is none",
                         base::printable(entry.path().string()));
    }
  }
  return "is no run and no YAML file";
}

/// Reports a path that is given as a configuration but is none. @return whether it did
bool refuse_path(const std::string& command, const std::string& word, config::Faults& faults) {
  if (word.starts_with('-') || word.find('=') != word.npos) return false;
  const bool exists = base::exists(word);
  const bool takes_config = command != kTraining && is_for(all_options().front(), command);
  const bool may_be_path = word.find('/') != word.npos || (takes_config && !is_key(word));
  if (!exists && !may_be_path) return false;
  const std::string advice = command == "predict" && exists
                                 ? "; the images come first: train predict IMAGES runs/NAME"
                                 : "; name a run's folder or a YAML file";
  faults.add({}, fmt::format("{}{} {}{}", command == kTraining ? "" : command + ": ",
                             base::printable(word), exists ? describe_path(word) : "does not exist",
                             advice));
  return true;
}

/// Reports words that are taken for the ImageNet example's folder of data but are none, and removes
/// them. What may be a misspelt option or a configuration is left to the parser.
void refuse_folders(std::vector<std::string>& words, config::Faults& faults) {
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i];
    const bool may_be_value =
        i > 0 && words[i - 1].starts_with("--") && words[i - 1].find('=') == std::string::npos;
    const bool is_name = is_key(word) || !imagenet_counterpart(word).empty();
    const bool exists = base::exists(word);
    std::error_code ignored;
    if (may_be_value || is_name || word.starts_with('-') || word.find('=') != word.npos ||
        is_configuration(word) || word.ends_with(".yaml") || word.ends_with(".yml") ||
        (exists && !std::filesystem::is_directory(word, ignored))) {
      continue;
    }
    faults.add({}, fmt::format("unexpected argument '{}': {}; options begin with '--', and keys "
                               "are set by KEY=VALUE",
                               base::printable(word),
                               exists ? "this folder has no folder 'train' of images"
                                      : "there is no folder of this name"));
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(i--));
  }
}

/// The names of the keys and sections at the top of the configuration.
std::set<std::string> top_names() {
  std::set<std::string> names;
  for (const config::FieldInfo& field : config_fields()) {
    names.insert(field.path.substr(0, field.path.find('.')));
  }
  return names;
}

std::string whole_help() {
  const std::set<std::string> names = top_names();
  std::vector<std::string> lines;
  for (const CommandHelp& command : kCommands) lines.push_back(command.usage);
  lines.emplace_back(kLauncherUsage);
  const std::string usage =
      fmt::format("usage: {}\n\n{}\n`train COMMAND --help` explains another command.",
                  base::join(lines, "\n       "), kCommands[0].summary);
  return usage + "\n" + options_text(kTraining) +
         "\nKeys of the configuration (`train --help keys` lists them, `train --help NAME` "
         "explains "
         "one):\n  " +
         config::wrapped(base::join({names.begin(), names.end()}, ", "), 2, config::kHelpColumns) +
         "\n";
}

/// Help on a word that the command line takes for a key or for the launcher, but that is neither a
/// key nor an option.
std::string help_of_alias(const std::string& name) {
  if (is_launcher_option(name)) {
    return fmt::format("--{} is passed on to syncbn-launch; `syncbn-launch --help` explains it\n",
                       name);
  }
  const std::string words = imagenet_counterpart(name);
  if (words.empty()) return "";
  const std::string last = words.substr(words.rfind("--") + 2);
  const std::string key = last.substr(0, last.find('='));
  return fmt::format("{}{} is the same as {} (docs/imagenet.md)\n", name.size() > 1 ? "--" : "-",
                     name, words) +
         (is_key(key) ? "\n" + config::help_text(key, config_fields()) : "");
}

}  // namespace

config::CommandLine parse_arguments(const std::string& command,
                                    const std::vector<std::string>& args, config::Faults& faults) {
  auto all = options_where([](const CommandOption& /*one*/) { return true; });
  // translate_imagenet_options() replaces them; here they are advice on a misspelt one.
  for (const std::string& name : imagenet_names())
    all.push_back(CommandOption(name, "", {}).option);
  std::vector<std::string> words = args;
  const std::filesystem::path first = words.empty() ? "" : words.front();
  // The run's config.yaml may be missing: reading it names what to do.
  const bool is_checkpoint =
      first.extension() == ".pt" && base::exists(first) && run_files::is_run(first.parent_path());
  const bool has_configuration = is_checkpoint || is_configuration(first);
  if (is_checkpoint) {
    const std::string config = "--config=" + (first.parent_path() / run_files::kConfig).string();
    const std::string resume = "--resume=" + first.string();
    words.front() = config;
    words.insert(words.begin() + 1, resume);
  } else if (has_configuration) {
    words.front().insert(0, "--config=");
  }
  auto parts = translate_imagenet_options(words);
  const bool is_refused = !has_configuration && !parts.empty() &&
                          refuse_path(command, parts.front().words.front(), faults);
  if (is_refused) parts.front().words.erase(parts.front().words.begin());
  const std::vector<config::FieldInfo> fields = config_fields();
  config::CommandLine line;
  for (TranslatedWords& part : parts) {
    if (part.typed.empty()) refuse_folders(part.words, faults);
    const std::string& typed = part.typed.empty() ? "" : part.typed.front();
    line = config::parse_command_line(part.words, all, fields, faults, std::move(line),
                                      typed.substr(0, typed.find('=')));
  }
  // Reports a word that was taken for the ImageNet example's folder of data, if there is no
  // configuration.
  if (!has_configuration && !is_refused && !line.has("config") && !args.empty()) {
    refuse_path(command, args.front(), faults);
  }
  for (const CommandOption& one : all_options()) {
    if (!line.has(one.option.path) || is_for(one, command)) continue;
    const bool is_e = one.option.path == "split" && is_evaluation(args);
    faults.add({}, fmt::format("--{}: only for {}", is_e ? "evaluate" : one.option.path,
                               commands_text(one)));
  }
  return line;
}

std::optional<bool> colours_of(const config::CommandLine& line) {
  const std::string when = line.value("color").value_or("auto");
  return when == "auto" ? std::nullopt : std::optional(when == "always");
}

std::string help_of(const std::vector<std::string>& args, const std::string& asked) {
  std::string topic = asked;
  std::ranges::replace(topic, '-', '_');
  if (topic == "keys") return config::keys_text(config_fields());
  const auto* const command =
      std::ranges::find(kCommands, topic.empty() ? args.front() : topic, &CommandHelp::name);
  std::vector<std::string> texts;  // `profile` is a command and a section, `ema` an option as well
  if (command != kCommands.end() && command->name != kTraining) {
    texts.push_back(fmt::format("usage: {}\n\n{}\n{}", command->usage, command->summary,
                                options_text(command->name)));
  } else if (topic.empty()) {
    return whole_help();
  }
  for (const CommandOption& one : all_options()) {
    if (one.option.path != topic || one.option.help.empty()) continue;
    const std::string commands = one.commands.empty() ? "all commands" : commands_text(one);
    texts.push_back(fmt::format("--{}: for {}\n{}", topic, commands,
                                config::option_lines(std::vector{one.option})));
  }
  if (is_key(topic)) texts.push_back(config::help_text(topic, config_fields()));
  if (texts.empty()) texts.push_back(help_of_alias(topic));
  if (texts.front().empty()) return config::help_text(topic, config_fields());  // a type, or throws
  return base::join(texts, "\n");
}

std::string help_texts() {
  std::string all;
  const auto add = [&](const std::vector<std::string>& args) {
    all +=
        fmt::format("\x1e{}\n{}", base::join(args, " "), help_of(args, *config::help_topic(args)));
  };
  add({"--help"});
  add({"-h"});
  add({"--help", "keys"});
  for (const std::string& topic : top_names()) add({"--help", topic});
  for (const CommandHelp& command : kCommands) {
    if (command.name != kTraining) add({command.name, "--help"});
  }
  return all;
}

std::string did_you_mean_command(const std::string& word) {
  if (word == "resume") return "; to resume a run, write `train runs/NAME`";
  std::vector<std::string> names;
  for (const CommandHelp& command : kCommands) {
    if (command.name == kTraining) continue;
    if (word.starts_with(command.name)) return fmt::format("; did you mean '{}'?", command.name);
    names.push_back(command.name);
  }
  return base::did_you_mean(word, names);
}

}  // namespace syncbn::train

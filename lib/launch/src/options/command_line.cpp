#include "options/command_line.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/options.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "options/option_table.h"

namespace syncbn::launch {
namespace {

/// "--nnodes" of "--nnodes=2".
std::string option_name(const std::string& word) {
  return word.substr(0, word.find('='));
}

/// What to do about a word that names no option.
std::string advice_on(const std::string& name, const std::string& typed) {
  throw_if_removed(name);
  const char* const kNumbers =
      "the number of workers is --nproc_per_node=N, and that of nodes --nnodes=N";
  return typed.starts_with("-n") ? kNumbers : "";  // -n 4, -np 4 of mpirun
}

/// The first of the option's variables that sets it, or "".
std::string variable_of(const config::FieldInfo& field) {
  for (const std::string& variable : field.environment) {
    const char* const value = std::getenv(variable.c_str());
    // Kubeflow's training operator sets torchrun's variable of a flag to the empty string.
    const bool may_be_empty = field.is_switch() && variable.starts_with("PET_");
    if (value != nullptr && (*value != '\0' || may_be_empty)) return variable;
  }
  return "";
}

}  // namespace

CommandLine::CommandLine(const std::vector<std::string>& words, Environment environment) {
  const std::vector<config::FieldInfo>& fields = option_fields();
  config::Faults faults;
  config::SplitLine line = config::split_line({.options = fields,
                                               .help = "syncbn-launch --help all",
                                               .has_program = true,
                                               .abbreviated = kTorchruns,
                                               .may_be_empty = kMayBeEmpty,
                                               .advice = advice_on},
                                              words, faults);
  faults.throw_if_any();
  for (const std::string& word : line.options) given_.push_back({word, ""});
  program_ = std::move(line.program);
  const bool counts = environment == Environment::kCounts;
  // As in torchrun, whose argparse removes these dashes.
  if (counts && program_.size() > 1 && program_[1] == "--") program_.erase(program_.begin() + 1);

  std::map<std::string, std::string> variables;
  for (const config::FieldInfo& field : fields) {
    const std::string name = "--" + field.path;
    const bool is_settled = !counts || has(name) || std::ranges::count(line.emptied, name) > 0;
    const std::string variable = is_settled ? "" : variable_of(field);
    if (variable.empty()) continue;
    variables[field.path] = variable;
    std::string word = name;
    if (const std::string value = std::getenv(variable.c_str()); !value.empty())
      word.append("=").append(value);
    given_.push_back({std::move(word), variable});
  }
  const config::OptionValues read = config::read_options(fields, line.options, faults, variables);
  if (!faults.empty()) fail(faults.messages().front());
  for (const auto& [name, values] : read.values) {
    values_.set(name, config::Value::of_scalar(values.back()));
  }
}

std::vector<std::string> CommandLine::options(unsigned without) const {
  std::vector<std::string> words;
  for (const Given& given : given_) {
    if ((tags_of(given.word) & without) == 0) words.push_back(given.word);
  }
  return words;
}

bool CommandLine::is_typed(const std::string& name) const {
  const Given* given = find(name);
  return given != nullptr && given->variable.empty();
}

std::vector<std::string> CommandLine::typed_with(unsigned tags) const {
  std::vector<std::string> names;
  for (const config::FieldInfo& field : option_fields()) {
    const std::string name = "--" + field.path;
    if ((field.tags & tags) != 0 && is_typed(name)) names.push_back(name);
  }
  return names;
}

std::string CommandLine::source_of(const std::string& name) const {
  const Given* given = find(name);
  if (given == nullptr || given->variable.empty()) return name;
  return fmt::format("environment variable {}: {}", given->variable, name);
}

void CommandLine::fail(const std::string& message) const {
  const size_t end = std::min(message.find_first_of("=: "), message.size());
  throw base::UserError(source_of(message.substr(0, end)) + message.substr(end));
}

const CommandLine::Given* CommandLine::find(const std::string& name) const {
  const auto found =
      std::ranges::find(given_, name, [](const Given& one) { return option_name(one.word); });
  return found == given_.end() ? nullptr : &*found;
}

}  // namespace syncbn::launch

#include "options/command_line.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>

#include "options/option_table.h"

namespace syncbn::launch {
namespace {

/// "--nnodes" of "--nnodes=2".
std::string option_name(const std::string& word) {
  return word.substr(0, word.find('='));
}

std::string option_word(const std::string& name, const std::string& value) {
  return value.empty() ? name : name + "=" + value;
}

const config::FieldInfo& field_of_letter(const std::vector<config::FieldInfo>& fields,
                                         const std::string& word) {
  for (const config::FieldInfo& field : fields) {
    const bool fits = !field.letter.empty() && word.starts_with(field.letter);
    if (fits && (word.size() == 2 || !field.is_switch())) return field;
  }
  const bool is_of_mpirun = word.starts_with("-n");  // -n 4, -np 4
  throw base::UserError(
      fmt::format("unknown option {}; {}", word,
                  is_of_mpirun ? "the number of workers is --nproc_per_node=N, and that of nodes "
                                 "--nnodes=N"
                               : "see syncbn-launch --help all"));
}

const config::FieldInfo& field_of_name(const std::vector<config::FieldInfo>& fields,
                                       const std::string& word) {
  std::string typed = option_name(word).substr(2);
  std::ranges::replace(typed, '-', '_');
  throw_if_removed(typed);
  std::vector<const config::FieldInfo*> torchruns;
  std::vector<const config::FieldInfo*> matches;
  std::vector<std::string> names;
  std::vector<std::string> matching_names;
  for (const config::FieldInfo& field : fields) {
    if (field.path == typed) return field;
    names.push_back(field.path);
    if (typed.empty() || !field.path.starts_with(typed)) continue;
    matches.push_back(&field);
    matching_names.push_back("--" + field.path);
    if ((field.tags & kTorchruns) != 0) torchruns.push_back(&field);
  }
  if (torchruns.size() == 1) return *torchruns[0];
  if (matches.size() == 1) return *matches[0];
  if (matches.empty()) {
    const auto nearest = base::nearest(typed, names);
    throw base::UserError(
        fmt::format("unknown option --{}{}; see syncbn-launch --help all", typed,
                    nearest ? fmt::format("; did you mean '--{}'?", *nearest) : ""));
  }
  throw base::UserError(
      fmt::format("option --{} is ambiguous: {}", typed, base::join(matching_names, ", ")));
}

/// What is wrong with an option's value, or "".
std::string fault_of(const config::FieldInfo& field, const std::string& text) {
  const auto& choices = field.choices;
  if (!choices.empty() && std::ranges::count(choices, text) == 0) {
    return fmt::format("expected one of {}, got '{}'{}", base::join(choices, ", "), text,
                       base::did_you_mean(text, choices));
  }
  if (!field.min || !field.max) return "";
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();  // in no range
  const bool is_integer = field.type.starts_with("integer");
  const bool has_type = !is_integer || base::parse_number<int>(text).has_value();
  const double number = base::parse_number<double>(text).value_or(kNone);
  if (has_type && number >= *field.min && number <= *field.max) return "";
  return fmt::format("expected a number from {} to {}, got '{}'", *field.min, *field.max, text);
}

std::string true_or_false(const std::string& text) {
  if (const auto on = read_flag(text)) return *on ? "true" : "false";
  throw CLI::ValidationError(fmt::format("expected true or false, got '{}'", text));
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

std::optional<bool> read_flag(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  if (is_number || text == "true" || text == "on" || text == "yes") return true;
  return std::nullopt;
}

void add_options(CLI::App& app, const std::vector<config::FieldInfo>& fields) {
  app.set_help_flag();  // --help is one of the fields
  for (const config::FieldInfo& field : fields) {
    const std::string name = field.letter + (field.letter.empty() ? "--" : ",--") + field.path;
    CLI::Option* const option =
        field.is_switch() ? app.add_flag(name, field.help) : app.add_option(name, field.help);
    option->take_last()->group(field.group);  // the last one counts, as in argparse
    option->type_name(field.value_name)->default_str(field.default_value);
    if (!field.environment.empty()) option->envname(field.environment.front());
    if (field.is_switch()) {
      option->transform(true_or_false);
    } else {
      option->check([&field](const std::string& text) { return fault_of(field, text); });
    }
  }
}

SplitLine split_line(const std::vector<config::FieldInfo>& fields,
                     const std::vector<std::string>& words) {
  SplitLine line;
  size_t i = 0;
  while (i < words.size() && words[i].size() > 1 && words[i][0] == '-') {
    const std::string& word = words[i++];
    if (word == "--") break;
    const bool is_letter = word[1] != '-';
    const config::FieldInfo& field =
        is_letter ? field_of_letter(fields, word) : field_of_name(fields, word);
    const std::string name = "--" + field.path;
    // "-r3" or "--redirects=3"; otherwise the value is the next word.
    const size_t before_value = is_letter ? 1 : std::min(word.find('='), word.size());
    std::string value = word.substr(std::min(before_value + 1, word.size()));
    const bool is_next = is_letter ? value.empty() : before_value == word.size();
    const bool is_last = is_next && i == words.size();
    if (is_next && !is_last && !field.is_switch()) value = words[i++];
    if (field.is_switch() && value == "{}") {  // CLI11 takes it for no value
      throw base::UserError(fmt::format("{}: expected true or false, got '{{}}'", name));
    }
    if (!value.empty() || field.is_switch()) {
      line.options.push_back(option_word(name, value));
    } else if (is_last || (field.tags & kMayBeEmpty) == 0) {
      throw base::UserError(fmt::format("option {} needs a value", name));
    } else {
      line.emptied.push_back(name);
      std::erase_if(line.options, [&](const std::string& one) { return option_name(one) == name; });
    }
  }
  line.program.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  return line;
}

CommandLine::CommandLine(const std::vector<std::string>& words, Environment environment) {
  const std::vector<config::FieldInfo>& fields = option_fields();
  SplitLine line = split_line(fields, words);
  for (const std::string& word : line.options) given_.push_back({word, ""});
  program_ = std::move(line.program);
  const bool counts = environment == Environment::kCounts;
  // As in torchrun, whose argparse removes these dashes.
  if (counts && program_.size() > 1 && program_[1] == "--") program_.erase(program_.begin() + 1);

  CLI::App app;
  add_options(app, fields);
  for (const config::FieldInfo& field : fields) {
    const std::string name = "--" + field.path;
    CLI::Option* const option = app.get_option(name);
    const bool is_settled = !counts || has(name) || std::ranges::count(line.emptied, name) > 0;
    const std::string variable = is_settled ? "" : variable_of(field);
    option->envname(variable);
    if (variable.empty()) continue;
    const std::string value = std::getenv(variable.c_str());
    given_.push_back({option_word(name, value), variable});
    // CLI11 skips variables that are empty.
    if (value.empty()) option->default_str("true")->force_callback();
  }
  std::ranges::reverse(line.options);  // CLI11 parses from the back
  try {
    app.parse(line.options);
  } catch (const CLI::ParseError& error) {
    fail(error.what());
  }
  for (const config::FieldInfo& field : fields) {
    const CLI::Option* const option = app.get_option("--" + field.path);
    if (option->count() == 0) continue;
    values_.set(field.path, config::Value::of_scalar(option->as<std::string>()));
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

#include "options/command_line.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "options/option_table.h"

namespace syncbn::launch {
namespace {

std::string source(const std::string& name, const std::string& variable) {
  return variable.empty() ? name
                          : fmt::format("environment variable {}, read as {}", variable, name);
}

}  // namespace

std::optional<bool> read_flag(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  if (is_number || text == "true" || text == "on" || text == "yes") return true;
  return std::nullopt;
}

CommandLine::CommandLine(const std::vector<config::FieldInfo>& fields,
                         const std::vector<std::string>& words, Environment environment)
    : fields_(fields) {
  size_t i = 0;
  while (i < words.size() && words[i].size() > 1 && words[i][0] == '-') {
    const std::string& word = words[i++];
    if (word == "--") break;
    const bool is_letter = word[1] != '-';
    const config::FieldInfo& field = is_letter ? field_of_letter(word) : field_of_name(word);
    // "-r3" or "--redirects=3"; otherwise the value is the next word.
    const size_t before_value = is_letter ? 1 : std::min(word.find('='), word.size());
    std::string value = word.substr(std::min(before_value + 1, word.size()));
    if (!field.is_switch()) {
      const bool is_next = is_letter ? value.empty() : before_value == word.size();
      if (is_next && i < words.size()) value = words[i++];
      if (value.empty()) {
        throw base::UserError(fmt::format("option --{} needs a value", field.path));
      }
    }
    add(field, value);
  }
  program_.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  if (environment == Environment::kIsSettled) return;
  // torchrun's argparse takes these dashes for its own.
  if (program_.size() > 1 && program_[1] == "--") program_.erase(program_.begin() + 1);
  for (const config::FieldInfo& field : fields) {
    for (const std::string& variable : field.environment) {
      const char* value = std::getenv(variable.c_str());
      // Kubeflow's training operator sets a flag's variable to nothing.
      if (value == nullptr || (*value == '\0' && !field.is_switch())) continue;
      if (!has("--" + field.path)) add(field, value, variable);
    }
  }
}

std::vector<std::string> CommandLine::options(const std::vector<std::string>& without) const {
  std::vector<std::string> options;
  for (const Given& given : given_) {
    if (std::find(without.begin(), without.end(), given.name) != without.end()) continue;
    options.push_back(given.value.empty() ? given.name : given.name + "=" + given.value);
  }
  return options;
}

bool CommandLine::is_typed(const std::string& name) const {
  const Given* given = find(name);
  return given != nullptr && given->variable.empty();
}

std::string CommandLine::source_of(const std::string& name) const {
  const Given* given = find(name);
  return given == nullptr ? name : source(name, given->variable);
}

void CommandLine::add(const config::FieldInfo& field, std::string value,
                      const std::string& variable) {
  const std::string name = "--" + field.path;
  if (field.is_switch() && !value.empty()) {
    const auto on = read_flag(value);
    if (!on) {
      throw base::UserError(
          fmt::format("{}: expected true or false, got '{}'", source(name, variable), value));
    }
    value = *on ? "true" : "false";
  }
  given_.push_back({name, value, variable});
}

const config::FieldInfo& CommandLine::field_of_letter(const std::string& word) const {
  for (const config::FieldInfo& field : fields_) {
    const bool fits = !field.letter.empty() && word.starts_with(field.letter);
    if (fits && (word.size() == 2 || !field.is_switch())) return field;
  }
  throw base::UserError(fmt::format("unknown option {}; see syncbn-launch --help", word));
}

const config::FieldInfo& CommandLine::field_of_name(const std::string& word) const {
  std::string typed = word.substr(2, word.find('=') - 2);
  std::replace(typed.begin(), typed.end(), '-', '_');
  std::vector<const config::FieldInfo*> torchruns;
  std::vector<const config::FieldInfo*> matches;
  std::vector<std::string> names;
  for (const config::FieldInfo& field : fields_) {
    if (field.path == typed) return field;
    names.push_back(field.path);
    if (typed.empty() || !field.path.starts_with(typed)) continue;
    matches.push_back(&field);
    if (is_torchruns(field)) torchruns.push_back(&field);
  }
  if (torchruns.size() == 1) return *torchruns[0];
  if (matches.size() == 1) return *matches[0];
  if (matches.empty()) {
    throw base::UserError(fmt::format("unknown option --{}{}; see syncbn-launch --help", typed,
                                      base::did_you_mean(typed, names)));
  }
  std::string all;
  for (const config::FieldInfo* field : matches) all += (all.empty() ? "--" : ", --") + field->path;
  throw base::UserError(fmt::format("option --{} is ambiguous: {}", typed, all));
}

const CommandLine::Given* CommandLine::find(const std::string& name) const {
  const auto found = std::find_if(given_.begin(), given_.end(),
                                  [&](const Given& given) { return given.name == name; });
  return found == given_.end() ? nullptr : &*found;
}

}  // namespace syncbn::launch

#include "options/command_line.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>

namespace syncbn::launch {
namespace {

std::string long_name(const CLI::Option& option) {
  return "--" + option.get_lnames().front();
}

}  // namespace

std::optional<bool> read_flag(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  const bool is_number =
      !text.empty() &&
      std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (is_number || text == "true" || text == "on" || text == "yes") return true;
  return std::nullopt;
}

CommandLine::CommandLine(const std::vector<OptionSource>& sources, const CLI::App& app, int argc,
                         const char* const* argv, Environment environment)
    : app_(app), sources_(sources) {
  split({argv + 1, argv + argc});
  if (environment == Environment::kIsSettled) return;
  // torchrun's argparse takes it for its own, too.
  if (program_.size() > 1 && program_[1] == "--") program_.erase(program_.begin() + 1);
  add_environment();
}

std::vector<std::string> CommandLine::options_without(const std::vector<std::string>& names) const {
  std::vector<std::string> options;
  std::copy_if(options_.begin(), options_.end(), std::back_inserter(options),
               [&](const std::string& option) {
                 const std::string name = option.substr(0, option.find('='));
                 return std::find(names.begin(), names.end(), name) == names.end();
               });
  return options;
}

std::string CommandLine::source_of(const std::string& name) const {
  const auto found = from_environment_.find(name);
  return found == from_environment_.end()
             ? name
             : fmt::format("environment variable {}, read as {}", found->second, name);
}

void CommandLine::split(const std::vector<std::string>& words) {
  size_t i = 0;
  while (i < words.size() && words[i].size() > 1 && words[i][0] == '-') {
    const std::string& word = words[i++];
    if (word == "--") break;
    const bool is_short = word[1] != '-';
    // "-r=3" is unusual, "-r3" and "-r 3" are not.
    const std::string name = is_short ? full_name_of_letter(word) : full_name(word);
    const size_t equals = word.find('=');
    std::string value;
    bool has_value = !is_short && equals != std::string::npos;
    if (has_value) value = word.substr(equals + 1);
    if (is_short && word.size() > 2) value = word.substr(2), has_value = true;
    if (!is_flag(name)) {
      if (!has_value && i < words.size()) value = words[i++];
      if (value.empty()) {
        throw base::UserError(fmt::format("option {} needs a value", name));
      }
    }
    add(name, value);
  }
  program_.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
}

void CommandLine::add_environment() {
  for (const OptionSource& source : sources_) {
    if (has(source.name)) continue;
    for (const std::string& variable : source.environment) {
      const char* value = std::getenv(variable.c_str());
      // Kubeflow's training operator sets a flag's variable to nothing.
      if (value == nullptr || (*value == '\0' && !source.is_flag)) continue;
      from_environment_[source.name] = variable;
      add(source.name, value);
      break;
    }
  }
}

void CommandLine::add(const std::string& name, std::string value) {
  if (is_flag(name) && !value.empty()) {
    const auto on = read_flag(value);
    if (!on) {
      throw base::UserError(
          fmt::format("{}: expected true or false, got '{}'", source_of(name), value));
    }
    value = *on ? "true" : "false";
  }
  given_.insert(name);
  options_.push_back(value.empty() ? name : name + "=" + value);
}

bool CommandLine::is_flag(const std::string& name) const {
  const auto source = std::find_if(sources_.begin(), sources_.end(),
                                   [&](const OptionSource& one) { return one.name == name; });
  return source != sources_.end() && source->is_flag;
}

std::string CommandLine::full_name_of_letter(const std::string& word) const {
  const CLI::Option* option = app_.get_option_no_throw(word.substr(0, 2));
  const bool known = option != nullptr && (word.size() == 2 || !is_flag(long_name(*option)));
  if (known) return long_name(*option);
  throw base::UserError(fmt::format("unknown option {}; see syncbn-launch --help", word));
}

std::string CommandLine::full_name(const std::string& word) const {
  std::string typed = word.substr(0, word.find('='));
  std::replace(typed.begin() + 2, typed.end(), '-', '_');
  std::vector<std::string> matches;
  std::vector<std::string> torchruns;
  std::vector<std::string> names;
  for (const OptionSource& source : sources_) {
    if (source.name == typed) return source.name;
    names.push_back(source.name.substr(2));
    if (typed.size() == 2 || source.name.rfind(typed, 0) != 0) continue;
    matches.push_back(source.name);
    if (source.is_torchruns) torchruns.push_back(source.name);
  }
  if (torchruns.size() == 1) return torchruns[0];
  if (matches.size() == 1) return matches[0];
  if (matches.size() > 1) {
    throw base::UserError(
        fmt::format("option {} is ambiguous: {}", typed, base::join(matches, ", ")));
  }
  throw base::UserError(fmt::format("unknown option {}{}; see syncbn-launch --help", typed,
                                    base::did_you_mean(typed.substr(2), names)));
}

}  // namespace syncbn::launch

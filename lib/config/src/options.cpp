#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <syncbn/config/options.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>

namespace syncbn::config {
namespace {

/// What is wrong with an option's value, or "".
std::string fault_of(const FieldInfo& field, const std::string& text) {
  const auto& choices = field.choices;
  if (field.is_switch() && !read_flag(text)) {
    return fmt::format("expected true or false, got '{}'", text);
  }
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

}  // namespace

std::optional<bool> read_flag(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  if (is_number || text == "true" || text == "on" || text == "yes") return true;
  return std::nullopt;
}

std::string name_in(const std::string& word) {
  std::string name = word.substr(0, word.find('='));
  name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
  std::ranges::replace(name, '-', '_');
  return name;
}

std::string suggestion(const LineRules& rules, const std::string& typed,
                       const std::string& dashes) {
  const std::string name = name_in(typed);
  if (!typed.starts_with('-') && find_key(name, rules.options))
    return fmt::format("; did you mean '--{}'?", name);
  if (const std::string advice = rules.advice(name, typed); !advice.empty()) return "; " + advice;
  std::vector<std::string> names;
  for (const FieldInfo& option : rules.options) names.push_back(option.path);
  if (const auto own = base::nearest(name, names))
    return fmt::format("; did you mean '--{}'?", *own);
  if (const auto key = nearest_key(name, rules.keys))
    return fmt::format("; did you mean '{}{}'?", dashes, *key);
  return rules.help.empty() ? "" : "; see " + rules.help;
}

OptionValues read_options(std::span<const FieldInfo> options, std::vector<std::string> words,
                          Faults& faults, const std::map<std::string, std::string>& variables) {
  CLI::App app;
  app.set_help_flag();  // --help is one of the options
  app.allow_extras();
  for (const FieldInfo& field : options) {
    const std::string name = "--" + field.path;
    CLI::Option* const option = field.is_switch() ? app.add_flag(name) : app.add_option(name);
    using Policy = CLI::MultiOptionPolicy;  // as in argparse, the last one counts
    option->multi_option_policy(field.is_list() ? Policy::TakeAll : Policy::TakeLast);
    option->check([&field](const std::string& text) { return fault_of(field, text); });
  }
  for (const auto& [name, variable] : variables) {
    CLI::Option* const option = app.get_option("--" + name)->envname(variable);
    // CLI11 skips variables that are empty.
    if (*std::getenv(variable.c_str()) == '\0') option->default_str("true")->force_callback();
  }
  std::ranges::reverse(words);  // CLI11 parses from the back
  try {
    app.parse(words);
  } catch (const CLI::ParseError&) {
    // The first option that refuses its value; all are asked below.
  }
  OptionValues read{.values = {}, .remaining = app.remaining()};
  for (const FieldInfo& field : options) {
    const CLI::Option* const option = app.get_option("--" + field.path);
    if (option->count() == 0) continue;
    try {
      auto values = option->reduced_results();
      if (!field.is_list()) values.resize(1);
      if (field.is_switch() && read_flag(values.front()) == false) continue;
      if (field.is_switch()) values.front() = "true";
      read.values[field.path] = std::move(values);
    } catch (const CLI::ParseError& error) {
      faults.add({}, error.what());
    }
  }
  return read;
}

}  // namespace syncbn::config

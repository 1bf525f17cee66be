#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <syncbn/config/options.h>

#include <algorithm>

namespace syncbn::config {
namespace {

/// The options that a word may name: several if it is an abbreviation of them.
std::vector<std::string> options_named(const LineRules& rules, const std::string& word) {
  const bool is_long = word.starts_with("--");
  const std::string name = name_in(word);
  std::vector<std::string> all;
  std::vector<std::string> preferred;
  for (const FieldInfo& option : rules.options) {
    const bool is_letter = !is_long && !option.letter.empty() && word.starts_with(option.letter) &&
                           (word.size() == 2 || option.needs_value());
    if (is_letter || (is_long && option.path == name)) return {option.path};
    if (!is_long || name.empty() || !option.path.starts_with(name)) continue;
    all.push_back(option.path);
    if ((option.tags & rules.abbreviated) != 0) preferred.push_back(option.path);
  }
  if (rules.abbreviated == 0 || all.empty() || !rules.advice(name, word).empty()) return {};
  return preferred.size() == 1 ? preferred : all;
}

}  // namespace

SplitLine split_line(const LineRules& rules, const std::vector<std::string>& words,
                     Faults& faults) {
  SplitLine line;
  size_t next = 0;
  while (next < words.size()) {
    const std::string& word = words[next];
    const bool is_dashed = word.size() > 1 && word[0] == '-';
    if (rules.has_program && (!is_dashed || !faults.empty())) break;
    ++next;
    if (rules.has_program && word == "--") break;

    const bool is_letter = is_dashed && word[1] != '-';
    const size_t equals = std::min(word.find('=', 1), word.size());
    const std::string typed = word.substr(0, equals);
    const bool has_next = next < words.size();
    const bool has_plain_next = has_next && !words[next].starts_with("--");
    const auto named = options_named(rules, word);
    const bool is_setting = !is_dashed && equals < word.size();  // KEY=VALUE
    const bool may_be_key = named.empty() && (is_setting || word.starts_with("--"));
    const auto key = may_be_key ? find_key(name_in(word), rules.keys) : std::nullopt;
    if (!key && named.size() != 1) {
      const char* const what = !named.empty() ? "the option"
                               : is_dashed    ? "unknown option"
                               : is_setting   ? "unknown key"
                                              : "unexpected argument";
      const std::string hint = named.empty()
                                   ? suggestion(rules, typed, is_setting ? "" : "--")
                                   : fmt::format(" is ambiguous: --{}", base::join(named, ", --"));
      faults.add({}, fmt::format("{} '{}'{}", what, shortened(typed), hint));
      if (has_plain_next && equals == word.size() && !words[next].starts_with('-')) ++next;
      continue;
    }
    const FieldInfo field = key ? *key : *find_key(named.front(), rules.options);
    const std::string option = key ? typed : "--" + field.path;
    const bool takes_any =
        has_next && rules.has_program && field.needs_value();  // "--rank" as well
    const bool may_take = has_plain_next && (!field.is_switch() || (key && read_flag(words[next])));
    std::optional<std::string> value;  // "-r3" or "--redirects=3"; otherwise the next word
    if (is_letter ? word.size() > 2 : equals < word.size()) {
      value = word.substr(is_letter ? 2 : equals + 1);
    } else if (takes_any || may_take) {
      value = words[next++];
    } else if (key && field.is_switch()) {
      value = "true";
    }
    if (!key && field.is_switch() && value && !rules.has_program) {
      faults.add({}, fmt::format("the option '{}' takes no value", option));
    } else if (field.is_switch() && value == "{}") {  // CLI11 takes it for no value
      faults.add({}, fmt::format("{}: expected true or false, got '{{}}'", option));
    } else if (value && (key || !value->empty())) {
      line.options.push_back(option + "=" + *value);
    } else if (!field.needs_value()) {
      line.options.push_back(option);
      if (!field.is_switch()) line.options.emplace_back();
    } else if (value && (field.tags & rules.may_be_empty) != 0) {
      line.emptied.push_back(option);
      std::erase_if(line.options,
                    [&](const std::string& one) { return one.starts_with(option + "="); });
    } else {
      faults.add({}, fmt::format("the option '{}' needs a value", option));
    }
  }
  line.program.assign(words.begin() + static_cast<std::ptrdiff_t>(next), words.end());
  return line;
}

}  // namespace syncbn::config

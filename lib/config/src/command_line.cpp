#include <syncbn/config/command_line.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/component.h>
#include <syncbn/config/help_lines.h>
#include <syncbn/config/layers.h>
#include <syncbn/config/options.h>
#include <syncbn/config/reference.h>
#include <syncbn/config/yaml.h>

#include <algorithm>

#include "advised_keys.h"

namespace syncbn::config {
namespace {

constexpr std::string_view kType = ".type";
constexpr std::string_view kOrNull = " or null";  // ends FieldInfo::type

/// A layer that sets one key.
Value layer_of(const std::string& path, Value value) {
  const size_t dot = path.rfind('.');
  Value layer = Value::of_map();
  layer.mark = value.mark;
  layer.set(path.substr(dot + 1), std::move(value));
  return dot == path.npos ? layer : layer_of(path.substr(0, dot), std::move(layer));
}

/// @param typed the option, as messages name it
Value value_of(const std::string& text, const FieldInfo& field, const std::string& typed) {
  const bool is_text = field.is_text();
  Value value = Value::of_scalar(text, /*quoted=*/is_text);
  if (is_text && field.type.ends_with(kOrNull) && text == "null") value = Value();
  if (!is_text) {
    try {
      value = parse_yaml(text, typed);
    } catch (const base::UserError&) {
      // The value stays a scalar: reading the field reports the expected type.
    }
  }
  const Mark mark{std::make_shared<const std::string>(typed)};
  for_each_value(value, [&mark](Value& one) {
    one.mark = mark;
    for (Value::Member& member : one.members) member.mark = mark;
  });
  return value;
}

LineRules rules_of(std::span<const FieldInfo> options, std::span<const FieldInfo> fields,
                   const std::string& help) {
  const auto advice = [fields](const std::string& name, const std::string& typed) -> std::string {
    if (const AdvisedKey* const known = advised_key(name)) return std::string(known->advice);
    const bool is_option = typed.starts_with('-');
    if (!is_option && (typed.ends_with(".yaml") || typed.ends_with(".yml"))) {
      return fmt::format("to read this configuration, write --config {}", shortened(typed));
    }
    const auto in_section = std::ranges::find_if(
        fields, [&](const FieldInfo& field) { return field.path.starts_with(name + "."); });
    if (in_section == fields.end()) return "";
    return fmt::format("it is a section: set its keys, such as '{}{}'", is_option ? "--" : "",
                       in_section->path);
  };
  return {.options = options, .keys = fields, .help = help, .advice = advice};
}

/// Sets a key.
/// @param word "--epochs=3" or "epochs=3"
/// @param typed for messages: the option that it stands for; empty: it is as typed
void set_key(const std::string& word, std::span<const FieldInfo> fields, const std::string& typed,
             Value& overrides, Faults& faults) {
  FieldInfo field = find_key(name_in(word), fields).value();
  const std::string option = word.substr(0, word.find('='));
  const std::string text = word.substr(option.size() + 1);
  const std::string& named = typed.empty() ? option : typed;
  // `--optimizer sgd` sets optimizer.type, `--optimizer '{lr: 1}'` any keys of the section.
  if (text.starts_with('{') && field.path.ends_with(kType) && !option.ends_with(kType)) {
    field.path.resize(field.path.size() - kType.size());
    field.type = "section";
  }
  // YAML reads it as null. For a list, the reader's message says how to write an empty one.
  if (text.empty() && !field.is_text() && !field.is_list()) {
    const bool may_be_null = field.type.ends_with(kOrNull);
    faults.add({}, fmt::format("{}: the value is empty; give it one ({}){}", named, field.type,
                               may_be_null ? ", or write null for none" : ""));
  } else {
    merge(layer_of(field.path, value_of(text, field, named)), overrides, faults);
  }
}

std::string help_of(const FieldInfo& field) {
  return help_line("--" + field.path + " " + field.type, field);
}

/// A line for each section: the types to choose from, or its keys.
std::string section_lines(const std::vector<FieldInfo>& fields) {
  constexpr size_t kShown = 12;
  std::vector<std::pair<std::string, std::vector<std::string>>> sections;
  for (const FieldInfo& field : fields) {
    const size_t dot = field.path.find('.');
    if (dot == field.path.npos) continue;
    const std::string section = field.path.substr(0, dot);
    if (sections.empty() || sections.back().first != section) sections.push_back({section, {}});
    auto& parts = sections.back().second;
    if (field.path == section + std::string(kType)) {
      for (const auto& [name, help] : field.alternatives) parts.push_back(name);
    } else if (field.only_for.empty()) {
      parts.push_back("." + field.path.substr(dot + 1));
    }
  }
  std::string out;
  for (const auto& [section, parts] : sections) {
    out += help_line("--" + section, base::join_some(parts, ", ", kShown));
  }
  return out;
}

}  // namespace

std::string list_text(const RegistryBase& registry) {
  std::string out;
  for (const auto& [entry, names] : registry.groups()) {
    if (!out.empty()) out += "\n";
    const std::string origin = entry->origin.value_or("");
    const std::string by = origin.empty() ? "" : fmt::format(" [{}]", origin);
    out += help_line(base::join(names, ", "), entry->help + by).substr(2);
    std::vector<FieldInfo> fields;
    entry->schema().info("", fields);
    for (const FieldInfo& field : fields) {
      out += help_line(field.path + " " + field.type, field);
    }
  }
  return out;
}

std::optional<std::string> CommandLine::value(const std::string& name) const {
  return has(name) ? std::optional(program.at(name).back()) : std::nullopt;
}

CommandLine parse_command_line(const std::vector<std::string>& args,
                               std::span<const FieldInfo> options,
                               std::span<const FieldInfo> fields, Faults& faults,
                               CommandLine before, const std::string& typed) {
  const SplitLine split = split_line(rules_of(options, fields, "--help"), args, faults);
  const OptionValues read = read_options(options, split.options, faults);
  CommandLine line = std::move(before);
  for (const auto& [name, values] : read.values) {
    line.program[name].insert(line.program[name].end(), values.begin(), values.end());
  }
  for (const std::string& word : read.remaining) {
    set_key(word, fields, typed, line.overrides, faults);
  }
  return line;
}

std::string keys_text(const std::vector<FieldInfo>& fields) {
  std::string out = "Keys of the configuration:\n";
  for (const FieldInfo& field : fields) {
    if (field.path.find('.') == field.path.npos) out += help_of(field);
  }
  return out + "\nSections, with their types or keys; --help SECTION explains one:\n" +
         section_lines(fields);
}

std::optional<std::string> help_topic(const std::vector<std::string>& args) {
  constexpr std::string_view kAttached = "--help=";
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].starts_with(kAttached)) return args[i].substr(kAttached.size());
    if (args[i] != "--help" && args[i] != "-h") continue;
    const std::string next = i + 1 < args.size() ? args[i + 1] : "";
    return next.starts_with("-") || next.find('=') != next.npos ? "" : next;
  }
  return std::nullopt;
}

std::string help_text(const std::string& topic, const std::vector<FieldInfo>& fields) {
  std::string out;
  const auto is_type = [&](const FieldGroup& group) {
    return std::ranges::any_of(
        group.types, [&](const std::string& type) { return group.section + "." + type == topic; });
  };
  std::vector<FieldGroup> groups = group_fields(fields);
  if (std::ranges::none_of(groups, is_type)) groups = group_fields_once(fields);
  for (const FieldGroup& group : groups) {
    const bool is_section = group.section == topic || group.section.starts_with(topic + ".");
    std::string lines;
    for (const FieldInfo& field : group.fields) {
      if (!is_section && !is_type(group) && field.path != topic) continue;
      lines += help_of(field);
      for (const auto& [name, help] : field.alternatives) lines += help_line("  " + name, help);
    }
    if (lines.empty()) continue;
    if (!out.empty()) out += "\n";
    const std::string types = group.types.empty() ? "" : ", type: " + base::join(group.types, ", ");
    if (!group.section.empty()) out += fmt::format("{}{}:\n", group.section, types);
    out += lines;
  }
  if (!out.empty()) return out;
  throw base::UserError(fmt::format("--help {}: there is no such key or section{}", topic,
                                    suggestion(rules_of({}, fields, ""), topic, "")));
}

}  // namespace syncbn::config

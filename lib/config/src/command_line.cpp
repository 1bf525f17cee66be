#include <syncbn/config/command_line.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/component.h>
#include <syncbn/config/layers.h>
#include <syncbn/config/reference.h>
#include <syncbn/config/wrapped.h>
#include <syncbn/config/yaml.h>

#include <algorithm>
#include <cstring>

#include "advised_keys.h"

namespace syncbn::config {
namespace {

constexpr const char* kType = ".type";
constexpr std::string_view kList = "list of ";    // begins FieldInfo::type
constexpr std::string_view kOrNull = " or null";  // ends it
constexpr size_t kHelpColumn = 28;
constexpr size_t kHelpWidth = 80;

std::optional<FieldInfo> find_key(const std::string& name, const std::vector<FieldInfo>& fields) {
  // The name of a section with a type stands for its type.
  for (const std::string& path : {name, name + kType}) {
    const auto found = std::ranges::find(fields, path, &FieldInfo::path);
    if (found != fields.end()) return *found;
  }
  // An item of a list, or a key of it.
  for (FieldInfo field : fields) {
    if (!field.type.starts_with(kList) || !name.starts_with(field.path + ".")) continue;
    const std::string item = name.substr(field.path.size() + 1);
    if (!base::parse_number<size_t>(item.substr(0, item.find('.')))) continue;
    field.type = item.find('.') == item.npos ? field.type.substr(kList.size()) : "of an item";
    field.path = name;
    return field;
  }
  return std::nullopt;
}

/// A layer that sets one key.
Value layer_of(const std::string& path, Value value) {
  Value layer = Value::of_map();
  layer.mark = value.mark;
  const size_t dot = path.find('.');
  layer.set(path.substr(0, dot),
            dot == path.npos ? std::move(value) : layer_of(path.substr(dot + 1), std::move(value)));
  layer.members.front().mark = layer.mark;
  return layer;
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

/// The layer of one option on the command line.
Value layer_of(const FieldInfo& field, const std::string& text, const std::string& option,
               const std::string& typed) {
  // `--optimizer sgd` sets optimizer.type, `--optimizer '{lr: 1}'` any keys of the section.
  const bool is_section = field.path.ends_with(kType) && !option.ends_with(kType);
  if (is_section && text.starts_with('{')) {
    FieldInfo section = field;
    section.path.resize(field.path.size() - std::strlen(kType));
    section.type = "section";
    return layer_of(section.path, value_of(text, section, typed));
  }
  return layer_of(field.path, value_of(text, field, typed));
}

bool is_true_or_false(const std::string& text) {
  bool ignored = false;
  Faults faults;
  return Codec<bool>::read(Value::of_scalar(text), ignored, "", faults);
}

/// What an unknown option or key probably means, to append to a message, or "".
std::string suggestion(const std::string& name, const std::string& dashes,
                       const std::vector<ProgramOption>& options,
                       const std::vector<FieldInfo>& fields) {
  if (const AdvisedKey* const known = advised_key(name)) return fmt::format("; {}", known->advice);
  const auto in_section = std::ranges::find_if(
      fields, [&](const FieldInfo& field) { return field.path.starts_with(name + "."); });
  if (in_section != fields.end()) {
    return fmt::format("; it is a section: set its keys, such as '{}{}'", dashes, in_section->path);
  }
  std::vector<std::string> own;
  own.reserve(options.size());
  for (const ProgramOption& option : options) own.push_back(option.name);
  auto nearest = base::nearest(name, own);
  if (!nearest) nearest = nearest_key(name, fields);
  return nearest ? fmt::format("; did you mean '{}{}'?", dashes, *nearest) : "";
}

class Parser {
 public:
  Parser(const std::vector<std::string>& args, const std::vector<ProgramOption>& options,
         const std::vector<FieldInfo>& fields, Faults& faults, CommandLine before,
         const std::string& typed)
      : args_(args),
        options_(options),
        fields_(fields),
        faults_(faults),
        typed_(typed),
        result_(std::move(before)) {}

  CommandLine parse() {
    while (next_ < args_.size()) parse_one(args_[next_++]);
    return std::move(result_);
  }

 private:
  void parse_one(const std::string& arg) {
    if (arg == "-h") return parse_one("--help");
    const size_t equals = arg.find('=');
    const bool is_option = arg.starts_with("--") && arg.size() > 2 && equals != 2;
    if (!is_option && (equals == arg.npos || equals == 0 || arg.starts_with('-'))) {
      return refuse(arg);
    }
    const std::string option = arg.substr(0, equals);
    std::string name = is_option ? option.substr(2) : option;
    std::ranges::replace(name, '-', '_');  // "--local-rank" and "--local_rank" are one option
    std::optional<std::string> attached;
    if (equals != std::string::npos) attached = arg.substr(equals + 1);

    const auto own = std::ranges::find(options_, name, &ProgramOption::name);
    if (own != options_.end() && is_option) {
      parse_program_option(*own, option, attached);
    } else if (own != options_.end()) {
      faults_.add({}, fmt::format("'{0}' is an option, not a key; write --{0}", shortened(arg)));
    } else if (const auto field = find_key(name, fields_)) {
      parse_override(*field, option, attached);
    } else {
      const std::string meant = suggestion(name, is_option ? "--" : "", options_, fields_);
      faults_.add({}, fmt::format("unknown {} '{}'{}", is_option ? "option" : "key",
                                  shortened(option), meant.empty() ? "; see --help" : meant));
      if (!attached) skip_value();
    }
  }

  /// Reports a word that is neither an option nor KEY=VALUE.
  void refuse(const std::string& arg) {
    std::string name = arg.substr(0, arg.find('='));
    name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
    std::ranges::replace(name, '-', '_');
    const bool is_name = std::ranges::count(options_, name, &ProgramOption::name) > 0 ||
                         find_key(name, fields_).has_value();
    std::string advice = "options begin with '--', and keys are set by KEY=VALUE";
    if (is_name) {
      advice = fmt::format("did you mean '--{}'?", name);
    } else if (arg.ends_with(".yaml") || arg.ends_with(".yml")) {
      advice = fmt::format("to read this configuration, write --config {}", shortened(arg));
    }
    faults_.add({}, fmt::format("unexpected argument '{}'; {}", shortened(arg), advice));
    if (is_name && arg.find('=') == arg.npos) skip_value();
  }

  /// Skips the value of an unknown option, which would be reported as a second fault.
  void skip_value() {
    if (next_ < args_.size() && !args_[next_].starts_with("-")) ++next_;
  }

  void parse_program_option(const ProgramOption& own, const std::string& option,
                            std::optional<std::string> attached) {
    const bool is_switch = own.value_name.empty();
    if (is_switch && attached) {
      faults_.add({}, fmt::format("the option '{}' takes no value", option));
    }
    if (is_switch || (own.has_optional_value() && !attached && !has_value())) attached = "";
    if (const auto text = take_value(option, std::move(attached))) {
      result_.program.push_back({own.name, *text});
    }
  }

  void parse_override(const FieldInfo& field, const std::string& option,
                      std::optional<std::string> attached) {
    if (field.is_switch() && !attached) {
      const bool given = next_ < args_.size() && is_true_or_false(args_[next_]);
      attached = given ? args_[next_++] : "true";
    }
    const auto text = take_value(option, std::move(attached));
    const std::string& typed = typed_.empty() ? option : typed_;
    // YAML reads it as null. For a list, the reader's message says how to write an empty one.
    if (text && text->empty() && !field.is_text() && !field.type.starts_with(kList)) {
      const bool may_be_null = field.type.ends_with(kOrNull);
      faults_.add({}, fmt::format("{}: the value is empty; give it one ({}){}", typed, field.type,
                                  may_be_null ? ", or write null for none" : ""));
    } else if (text) {
      merge(layer_of(field, *text, option, typed), result_.overrides, faults_);
    }
  }

  /// Whether the next word can be a value: not an option, but a negative number can.
  bool has_value() const { return next_ < args_.size() && !args_[next_].starts_with("--"); }

  std::optional<std::string> take_value(const std::string& option,
                                        std::optional<std::string> attached) {
    if (attached) return attached;
    if (has_value()) return args_[next_++];
    faults_.add({}, fmt::format("the option '{}' needs a value", option));
    return std::nullopt;
  }

  const std::vector<std::string>& args_;
  const std::vector<ProgramOption>& options_;
  const std::vector<FieldInfo>& fields_;
  Faults& faults_;
  const std::string& typed_;
  CommandLine result_;
  size_t next_ = 0;
};

std::string help_line(const std::string& name, const std::string& text) {
  if (text.empty()) return fmt::format("  {}\n", name);
  // If the name is too long for its column, the help starts on the next line.
  const std::string gap = name.size() + 4 > kHelpColumn ? "\n" + std::string(kHelpColumn, ' ') : "";
  return fmt::format("  {:<{}}{}{}\n", name, kHelpColumn - 2, gap,
                     wrapped(text, kHelpColumn, kHelpWidth));
}

std::string describe(const FieldInfo& field) {
  std::vector<std::string> notes;
  if (!field.range.empty()) notes.push_back(field.range);
  if (!field.unit.empty()) notes.push_back("in " + field.unit);
  if (field.required) {
    notes.emplace_back("required");
  } else if (!field.default_value.empty()) {
    notes.push_back("default " + field.default_value);
  }
  return notes.empty() ? field.help : field.help + " (" + base::join(notes, "; ") + ")";
}

/// "optimizer, type: adam, adamw"
std::string heading(const FieldGroup& group) {
  return group.types.empty() ? group.section
                             : group.section + ", type: " + base::join(group.types, ", ");
}

std::string help_of(const FieldInfo& field) {
  return help_line("--" + field.path + " " + field.type, describe(field));
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
    if (field.path == section + kType) {
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
      out += help_line(field.path + " " + field.type, describe(field));
    }
  }
  return out;
}

std::optional<std::string> CommandLine::value(const std::string& name) const {
  const std::vector<std::string> all = values(name);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

std::vector<std::string> CommandLine::values(const std::string& name) const {
  std::vector<std::string> all;
  for (const Setting& setting : program) {
    if (setting.name == name) all.push_back(setting.value);
  }
  return all;
}

CommandLine parse_command_line(const std::vector<std::string>& args,
                               const std::vector<ProgramOption>& options,
                               const std::vector<FieldInfo>& fields, Faults& faults,
                               CommandLine before, const std::string& typed) {
  return Parser(args, options, fields, faults, std::move(before), typed).parse();
}

std::string help_text(const std::string& usage, const std::vector<ProgramOption>& options) {
  std::string out = usage + "\n\nOptions:\n";
  for (const ProgramOption& option : options) {
    if (option.help.empty()) continue;
    const std::string value = option.value_name.empty() ? "" : " " + option.value_name;
    out += help_line("--" + option.name + value, option.help);
  }
  return out;
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
    if (!group.section.empty()) out += heading(group) + ":\n";
    out += lines;
  }
  if (!out.empty()) return out;
  throw base::UserError(fmt::format("--help {}: there is no such key or section{}", topic,
                                    suggestion(topic, "", {}, fields)));
}

}  // namespace syncbn::config

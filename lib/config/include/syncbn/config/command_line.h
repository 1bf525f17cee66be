#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// An option of the program itself, not a key of its configuration.
struct ProgramOption {
  std::string name;        ///< "config"
  std::string value_name;  ///< "FILE"; "[KIND]": optional; empty: a switch without a value
  std::string help;        ///< empty: not listed in --help

  bool has_optional_value() const { return value_name.starts_with('['); }
};

struct CommandLine {
  struct Setting {
    std::string name;
    std::string value;
  };
  std::vector<Setting> program;  ///< program options in the order given
  Value overrides;               ///< all keys, as a layer; marks name the options

  bool has(const std::string& name) const { return value(name).has_value(); }
  /// The last value given to a program option.
  std::optional<std::string> value(const std::string& name) const;
  /// All values given to a program option.
  std::vector<std::string> values(const std::string& name) const;
};

/// Parses `args` (without the program's name): `--name value`, `--name=value` or `name=value`, with
/// dashes or underscores. A key is named by its path (`optimizer.lr=0.1`, `transforms.0.size=64`
/// for an item of a list), a section with a type by its own name (`--optimizer adamw`). true|false
/// keys need no value (`--overwrite`). Values are YAML (`--widths=[16,32]`, `--limit=null`), except
/// for keys of type text. The last value for a key counts. Adds mistakes to `faults`.
/// @param before what the arguments before these have set
/// @param typed for messages: the option that `args` stand for; empty: they are as typed
CommandLine parse_command_line(const std::vector<std::string>& args,
                               const std::vector<ProgramOption>& options,
                               const std::vector<FieldInfo>& fields, Faults& faults,
                               CommandLine before = {}, const std::string& typed = "");

/// The topic that `args` ask help for: "optimizer" for `--help optimizer`, "" for `--help` or `-h`
/// alone, std::nullopt without these.
std::optional<std::string> help_topic(const std::vector<std::string>& args);

/// The part of the text of `--help` about program options.
std::string help_text(const std::string& usage, const std::vector<ProgramOption>& options);

/// The part of the text of `--help` about keys: those outside of sections, and the sections.
std::string keys_text(const std::vector<FieldInfo>& fields);

/// The text of `--help topic`. The topic is a key, a section ("optimizer") or one of a section's
/// types ("optimizer.adamw").
/// @throws base::UserError if there is no such topic.
std::string help_text(const std::string& topic, const std::vector<FieldInfo>& fields);

class RegistryBase;

/// A table of the alternatives that a configuration can choose: names, help, the plug-in in
/// brackets, and below each the options with their defaults. Alternatives with the same help,
/// plug-in and options share an entry.
std::string list_text(const RegistryBase& registry);

}  // namespace syncbn::config

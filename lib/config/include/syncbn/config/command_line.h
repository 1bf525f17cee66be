#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

struct CommandLine {
  std::map<std::string, std::vector<std::string>> program;  ///< values by option, in order
  Value overrides;  ///< all keys, as a layer; marks name the options

  bool has(const std::string& name) const { return program.contains(name); }
  /// The last value given to a program option; empty if it was left out.
  std::optional<std::string> value(const std::string& name) const;
};

/// Parses `args` (without the program's name): `--name value`, `--name=value` or `name=value`, with
/// dashes or underscores. A key is named by its path (`optimizer.lr=0.1`, `transforms.0.size=64`
/// for an item of a list), a section with a type by its own name (`--optimizer adamw`). true|false
/// keys need no value (`--overwrite`). Values are YAML (`--widths=[16,32]`, `--limit=null`), except
/// for keys of type text. The last value for a key counts. Adds mistakes to `faults`.
/// @param before what the arguments before these have set
/// @param typed for messages: the option that `args` stand for; empty: they are as typed
CommandLine parse_command_line(const std::vector<std::string>& args,
                               std::span<const FieldInfo> options,
                               std::span<const FieldInfo> fields, Faults& faults,
                               CommandLine before = {}, const std::string& typed = "");

/// The topic that `args` ask help for: "optimizer" for `--help optimizer`, "" for `--help` or `-h`
/// alone, std::nullopt without these.
std::optional<std::string> help_topic(const std::vector<std::string>& args);

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

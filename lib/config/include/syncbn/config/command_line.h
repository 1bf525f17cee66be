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
  std::string value_name;  ///< "FILE"; empty: a switch without a value
  std::string help;        ///< empty: not listed in --help
};

/// A key of the configuration set on the command line.
struct Override {
  std::string option;  ///< as written: "--optimizer.lr"
  std::string path;    ///< "optimizer.lr"
  Value value;         ///< its mark names the option
};

struct CommandLine {
  struct Setting {
    std::string name;
    std::string value;
  };
  std::vector<Setting> program;  ///< program options in the order given
  std::vector<Override> overrides;

  bool has(const std::string& name) const { return value(name).has_value(); }
  /// The last value given to a program option.
  std::optional<std::string> value(const std::string& name) const;
};

/// Parses `args` (without the program's name): `--name value` or `--name=value`, with dashes or
/// underscores. A key is named by its path (`--optimizer.lr=0.1`), a section with a type by its own
/// name (`--optimizer adamw`). true|false keys need no value (`--overwrite`). Values are YAML
/// (`--widths=[16,32]`, `--limit=null`), except for keys of type text. Adds mistakes to `faults`.
CommandLine parse_command_line(const std::vector<std::string>& args,
                               const std::vector<ProgramOption>& options,
                               const std::vector<FieldInfo>& fields, Faults& faults);

/// Writes overrides into a configuration before it is read. If an override changes the type of a
/// section, the other options of that section are dropped. If a key is given twice, the last value
/// counts; otherwise the order does not matter.
void apply_overrides(const std::vector<Override>& overrides, Value& config);

/// The text of `--help`: program options, then the keys by section.
std::string help_text(const std::string& usage, const std::vector<ProgramOption>& options,
                      const std::vector<FieldInfo>& fields);

}  // namespace syncbn::config

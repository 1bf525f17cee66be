#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// An option of the program itself, beside the keys of its configuration.
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

/// A command line taken apart.
struct CommandLine {
  struct Setting {
    std::string name;
    std::string value;
  };
  std::vector<Setting> program;  ///< program options in the order given
  std::vector<Override> overrides;

  bool has(const std::string& name) const;
  /// The last value given to a program option.
  std::optional<std::string> value(const std::string& name) const;
};

/// Takes `args` (without the program's name) apart. Written `--name value` or `--name=value`, with
/// dashes or underscores; a key is its path (`--optimizer.lr=0.1`); a section with a type may be
/// set by its type alone (`--optimizer adamw`); true|false keys may stand alone (`--overwrite`).
/// Values of keys are read as YAML, so `--widths=[16,32]` and `--limit=null` work; keys of type
/// text take theirs as it is. Adds every fault it meets.
CommandLine parse_command_line(const std::vector<std::string>& args,
                               const std::vector<ProgramOption>& options,
                               const std::vector<FieldInfo>& fields, Faults& faults);

/// Puts overrides into a configuration before it is read. Choosing another type for a section
/// drops the options that the configuration gave to the former type; the order on the command line
/// does not matter, but for one key given twice, where the last one counts.
void apply_overrides(const std::vector<Override>& overrides, Value& config);

/// The text of `--help`: program options, then the keys by section, each with type, default, range
/// and unit.
std::string help_text(const std::string& usage, const std::vector<ProgramOption>& options,
                      const std::vector<FieldInfo>& fields);

}  // namespace syncbn::config

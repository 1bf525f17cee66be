#pragma once

#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace syncbn::launch {

/// Reads true, 1, on, yes, or false, 0, off, no, in any case; empty for other text. As in torchrun,
/// any number but 0 is true.
std::optional<bool> read_flag(std::string text);

/// Registers options with CLI11: names, groups, help, values that are allowed, and variables.
void add_options(CLI::App& app, const std::vector<config::FieldInfo>& fields);

/// A command line before CLI11 reads it.
struct SplitLine {
  std::vector<std::string> options;  ///< "--name=value" and "--name", in the order given
  std::vector<std::string> emptied;  ///< "--name" of options that an empty value has reset
  std::vector<std::string> program;  ///< the program's name and all that follows it
};

/// Does what CLI11 cannot: spells abbreviations, letters and dashes as the options' names, and
/// finds the program.
/// @param words without the launcher's own name.
/// @throws base::UserError for unknown and ambiguous options, and for missing values.
SplitLine split_line(const std::vector<config::FieldInfo>& fields,
                     const std::vector<std::string>& words);

/// The launcher's options on the command line and in the environment.
class CommandLine {
 public:
  /// Whether variables set the options that are not given (kCounts).
  enum class Environment { kCounts, kIsSettled };

  /// @param words without the launcher's own name.
  /// @throws base::UserError that names the option, and the variable that set it.
  CommandLine(const std::vector<std::string>& words, Environment environment);

  /// The options' values, as TypedOptions' schema reads them.
  const config::Value& values() const { return values_; }
  /// "--name=value" and "--name" in the order given, then those of the environment.
  /// @param without tags of options to leave out.
  std::vector<std::string> options(unsigned without = 0) const;
  const std::vector<std::string>& program() const { return program_; }

  /// Whether the option ("--nnodes") was given, on the command line or in the environment.
  bool has(const std::string& name) const { return find(name) != nullptr; }
  /// Whether the option was given on the command line.
  bool is_typed(const std::string& name) const;
  /// The options with one of these tags that were given on the command line, in the table's order.
  std::vector<std::string> typed_with(unsigned tags) const;
  /// "--nnodes", or the variable that stands for it.
  std::string source_of(const std::string& name) const;
  /// @param message starts with an option's name. If a variable set the option, names that instead.
  /// @throws base::UserError always.
  [[noreturn]] void fail(const std::string& message) const;

 private:
  struct Given {
    std::string word;      ///< "--nnodes=2"
    std::string variable;  ///< empty: given on the command line
  };

  const Given* find(const std::string& name) const;

  std::vector<Given> given_;
  std::vector<std::string> program_;
  config::Value values_ = config::Value::of_map();
};

}  // namespace syncbn::launch

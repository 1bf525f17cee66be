#pragma once

#include <syncbn/config/field_info.h>

#include <optional>
#include <string>
#include <vector>

namespace syncbn::launch {

/// Reads true, 1, on, yes, or false, 0, off, no, in any case; empty for other text. As in torchrun,
/// any number but 0 is true.
std::optional<bool> read_flag(std::string text);

/// The launcher's part of the command line, normalised for CLI11: abbreviations, letters and dashes
/// become the options' names, and values follow "=". Options that only the environment sets are
/// appended. The program's name and all that follows it belong to the program.
class CommandLine {
 public:
  /// Whether variables set the options that are not given (kCounts).
  enum class Environment { kCounts, kIsSettled };

  /// @param words without the launcher's own name.
  /// @throws base::UserError for unknown and ambiguous options, and for missing values.
  CommandLine(const std::vector<config::FieldInfo>& fields, const std::vector<std::string>& words,
              Environment environment);

  /// "--name=value" and "--name" in the order given.
  /// @param without options to leave out.
  std::vector<std::string> options(const std::vector<std::string>& without = {}) const;
  const std::vector<std::string>& program() const { return program_; }

  /// Whether the option was given, on the command line or in the environment.
  bool has(const std::string& name) const { return find(name) != nullptr; }
  /// Whether the option was given on the command line.
  bool is_typed(const std::string& name) const;
  /// "--nnodes", or the variable that stands for it.
  std::string source_of(const std::string& name) const;

 private:
  struct Given {
    std::string name;      ///< "--nnodes"
    std::string value;     ///< empty: none
    std::string variable;  ///< empty: given on the command line
  };

  void add(const config::FieldInfo& field, std::string value, const std::string& variable = "");
  const config::FieldInfo& field_of_letter(const std::string& word) const;
  const config::FieldInfo& field_of_name(const std::string& word) const;
  const Given* find(const std::string& name) const;

  const std::vector<config::FieldInfo>& fields_;
  std::vector<Given> given_;
  std::vector<std::string> program_;
};

}  // namespace syncbn::launch

#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "options/option_table.h"

namespace syncbn::launch {

/// true, 1, on, yes or false, 0, off, no, in any case; nothing when it is something else, or empty.
/// Any number but 0 is on, as torchrun has it.
std::optional<bool> read_flag(std::string text);

/// The launcher's own words, settled for CLI11, which gets every option spelled in full, those of
/// the environment among them: abbreviations, dashes for underscores, true and false in words. What
/// stands after the program's name is the program's.
class CommandLine {
 public:
  /// Where to look for options that are not given.
  enum class Environment { kCounts, kIsSettled };

  /// @throws base::UserError for unknown and ambiguous options, and for missing values.
  CommandLine(const std::vector<OptionSource>& sources, const CLI::App& app, int argc,
              const char* const* argv, Environment environment);

  /// "--name=value" and "--name", those of the environment last.
  const std::vector<std::string>& options() const { return options_; }
  /// As CLI11 wants them: last first.
  std::vector<std::string> reversed_options() const { return {options_.rbegin(), options_.rend()}; }
  const std::vector<std::string>& program() const { return program_; }

  /// Whether the option was given, here or in the environment.
  bool has(const std::string& name) const { return given_.count(name) > 0; }

  /// Whether it was given here, and not in the environment.
  bool is_typed(const std::string& name) const {
    return has(name) && from_environment_.count(name) == 0;
  }

  /// All that was given, "--name=value", but for these options.
  std::vector<std::string> options_without(const std::vector<std::string>& names) const;

  /// "--nnodes", or the variable that stands for it here.
  std::string source_of(const std::string& name) const;

 private:
  void split(const std::vector<std::string>& words);
  void add_environment();
  void add(const std::string& name, std::string value);
  bool is_flag(const std::string& name) const;
  std::string full_name_of_letter(const std::string& word) const;
  std::string full_name(const std::string& word) const;

  const CLI::App& app_;
  const std::vector<OptionSource>& sources_;
  std::set<std::string> given_;
  std::map<std::string, std::string> from_environment_;  ///< option: variable
  std::vector<std::string> options_;
  std::vector<std::string> program_;
};

}  // namespace syncbn::launch

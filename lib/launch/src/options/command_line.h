#pragma once

#include <syncbn/config/value.h>

#include <string>
#include <vector>

namespace syncbn::launch {

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

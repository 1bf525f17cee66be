#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace syncbn::config {

/// Description of a field for help, the reference and command lines.
struct FieldInfo {
  std::string path;           ///< "optimizer.lr"
  std::string type;           ///< "number", "integer", "true|false", "text", ...
  std::string default_value;  ///< "0.1"; empty: none
  std::string unit;           ///< "s", "samples"; empty: none
  std::string range;          ///< "above 0"; empty: any
  std::string help;
  std::string only_for;  ///< "type: sgd" if the key belongs to an alternative
  bool required = false;
  std::optional<double> min;         ///< inclusive
  std::optional<double> max;         ///< inclusive
  std::vector<std::string> choices;  ///< empty: any
  /// For the key that chooses between alternatives: their names, and a line about each.
  std::vector<std::pair<std::string, std::string>> alternatives;

  std::string group;                     ///< heading in help
  std::string value_name;                ///< "FILE", shown in help in place of the type
  std::string letter;                    ///< "-r"; empty: none
  std::vector<std::string> other_names;  ///< what other programs call it, for hints
  std::vector<std::string> environment;  ///< variables that set it; the first that is set counts
  unsigned tags = 0;                     ///< attributes that the program defines, as bits

  /// Whether a command line may name the field without a value.
  bool is_switch() const { return type == "true|false"; }
  bool is_text() const { return type.starts_with("text"); }
  bool is_list() const { return type.starts_with("list of "); }
  /// Whether a command line names the field only with a value: one in brackets may be left out.
  bool needs_value() const { return !is_switch() && !value_name.starts_with('['); }
};

/// The field that a command line sets by `name`: a key, a section by its type, or an item of a
/// list.
std::optional<FieldInfo> find_key(const std::string& name, std::span<const FieldInfo> fields);

/// The key that `name` probably means: one that ends in `.name`, one that other programs call so,
/// or one with a similar spelling.
std::optional<std::string> nearest_key(const std::string& name, std::span<const FieldInfo> fields);

}  // namespace syncbn::config

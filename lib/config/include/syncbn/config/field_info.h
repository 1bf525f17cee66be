#pragma once

#include <string>
#include <utility>
#include <vector>

namespace syncbn::config {

/// One line of help or of the reference.
struct FieldInfo {
  std::string path;           ///< "optimizer.lr"
  std::string type;           ///< "number", "integer", "true|false", "text", ...
  std::string default_value;  ///< "0.1"; empty: none
  std::string unit;           ///< "s", "samples"; empty: none
  std::string range;          ///< "above 0"; empty: any
  std::string help;
  std::string only_for;  ///< "type: sgd" where the key exists for one alternative only
  bool required = false;
  /// For the key that chooses between alternatives: their names, and a line about each.
  std::vector<std::pair<std::string, std::string>> alternatives;
};

}  // namespace syncbn::config

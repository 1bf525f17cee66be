#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/config/value.h>

namespace syncbn::config {

/// Reads a YAML file. Marks values and keys with their positions; resolves anchors, aliases and
/// merge keys (`<<: *base`).
/// @throws base::UserError with file:line:column for a syntax error, a key written twice, a key
///   that is not plain text, or several documents; naming the file if it cannot be read.
Value load_yaml(const std::filesystem::path& path);

/// The text of a YAML file.
/// @throws base::UserError naming the file if it cannot be read or is larger than 128 KiB.
std::string read_yaml(const std::filesystem::path& path);

/// load_yaml() for the text `given`. Marks name `source` in place of a file's path.
Value parse_yaml(const std::string& given, const std::string& source);

/// YAML text that parse_yaml() reads back to the same value; ends with a newline.
std::string to_yaml(const Value& value);

/// to_yaml() with a comment after each value that says where it was set: the file and line, or the
/// option, of the same key in `origins`; else "default".
std::string to_yaml(const Value& value, const Value& origins);

/// A key with different values in two sections.
struct Change {
  std::string path;    ///< "optimizer.lr"
  std::string before;  ///< as YAML on one line
  std::string after;

  std::string str() const;  ///< "optimizer.lr 0.2 (was 0.1)"
};

/// The keys that both sections have and whose values differ.
std::vector<Change> changes(const Value& before, const Value& after);

/// All keys that are not sections, with their values as YAML on one line: {"optimizer.lr", "0.1"}.
std::vector<std::pair<std::string, std::string>> flattened(const Value& value);

}  // namespace syncbn::config

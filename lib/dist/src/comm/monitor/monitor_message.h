#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// What ranks tell each other outside of collectives. On the wire a line: fields between tabs.
struct Message {
  static constexpr int kAll = -1;

  int from = 0;
  int to = kAll;
  std::string type;
  std::vector<std::string> fields;

  /// With a newline. Control characters in fields become blanks.
  std::string line() const;
  /// @param line without the newline. Nothing for a line that line() does not make.
  static std::optional<Message> parse(const std::string& line);
  /// Empty if there is no such field.
  std::string field(size_t index) const { return index < fields.size() ? fields[index] : ""; }
  /// 0 if there is no such field, or it is not a number.
  uint64_t number(size_t index) const;
};

}  // namespace syncbn::dist::detail

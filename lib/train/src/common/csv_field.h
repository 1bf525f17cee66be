#pragma once

#include <string>

namespace syncbn::train {

/// A field of a CSV file, in quotes where the format asks for them (RFC 4180).
inline std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

}  // namespace syncbn::train

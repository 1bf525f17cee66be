#pragma once

#include <string>

namespace syncbn::test {

/// How many times `part` occurs in `text`.
inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace syncbn::test

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace syncbn::base {

/// Quotes a word for a shell, always.
std::string in_single_quotes(std::string_view word);

/// Joins words into a shell command, with quotes only where they are needed.
std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace syncbn::base

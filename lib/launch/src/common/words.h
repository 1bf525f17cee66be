#pragma once

#include <syncbn/base/text.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::words_of;

/// Splits into words as a shell does: removes quotes and backslashes, and expands nothing. Empty if
/// a quote is not closed.
std::optional<std::vector<std::string>> shell_words(std::string_view text);

/// Quotes a word for a shell, always.
std::string in_single_quotes(std::string_view word);

/// Joins words into a shell command, with quotes only where they are needed.
std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace syncbn::launch

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

/// Splits "a, b" into "a" and "b"; no words for an empty text. A comma at the end yields an empty
/// last word, for the caller to refuse.
std::vector<std::string> words_of(std::string_view text);

/// Splits into words as a shell does: removes quotes and backslashes, and expands nothing. Empty if
/// a quote is not closed.
std::optional<std::vector<std::string>> shell_words(std::string_view text);

/// Quotes a word for a shell, always.
std::string in_single_quotes(std::string_view word);

/// Joins words into a shell command, with quotes only where they are needed.
std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace syncbn::launch

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

/// "a, b" as "a" and "b"; of nothing there are none. A comma at the end leaves an empty word behind
/// it, for the caller to refuse.
std::vector<std::string> words_of(std::string_view text);

/// Words as a shell would split them, quotes and backslashes taken off, and nothing else expanded.
/// Nothing where a quote is not closed.
std::optional<std::vector<std::string>> shell_words(std::string_view text);

/// A word in single quotes, as a shell takes them.
std::string in_single_quotes(std::string_view word);

/// Words as one could type them into a shell; quotes only where they are needed.
std::string shell_quoted(const std::vector<std::string>& words);

}  // namespace syncbn::launch

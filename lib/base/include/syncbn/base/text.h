#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::base {

/// The candidate nearest to `word` by edit distance, when it is near enough to be what was meant.
std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates);

/// `"; did you mean 'x'?"` or nothing: the tail of a message about an unknown name.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

/// "1 rank", "2 ranks". @param noun in the singular; its plural takes an s.
std::string counted(int64_t count, std::string_view noun);

/// Text of unknown origin as it can be shown: control characters but those that are kept, a byte
/// order mark and bytes that are no UTF-8 become "\\x1b".
std::string printable(std::string_view text, std::string_view kept = "");

/// The whole of `text` as a number; nothing when it is anything else (also with a blank or a plus
/// sign before it) or out of range. Instantiated for integers of 16 bits and more, float and
/// double.
template <class Number>
std::optional<Number> parse_number(std::string_view text);

/// The longest beginning of `text` that has at most `max_bytes` and does not cut a UTF-8 character.
std::string_view utf8_prefix(std::string_view text, size_t max_bytes);

/// "1.5 s", "320 ms", "2 min 5 s".
std::string format_seconds(double seconds);

/// "57.3 kB", "1.2 GB" (powers of 1000).
std::string format_bytes(uint64_t bytes);

}  // namespace syncbn::base

#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::base {

/// The candidate that a misspelt `word` probably means: the nearest by edit distance, else the
/// shortest with the same beginning; std::nullopt if there is none.
std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates);

/// The end of a message about an unknown name: "; did you mean 'x'?", or "".
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// Splits "a, b" into "a" and "b"; an empty text has no words. A comma at the end yields an empty
/// last word, which the caller can refuse.
std::vector<std::string> words_of(std::string_view text);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

/// join() of the first `max` parts and the number of the others: "cat, dog, and 998 more".
std::string join_some(std::vector<std::string> parts, std::string_view separator, size_t max);

/// "1 rank", "2 ranks", "2 classes".
/// @param noun in the singular; must form its plural with an s, or with es after an s.
std::string counted(int64_t count, std::string_view noun);

/// Whether a shell wildcard matches a dotted name, or the part of it before one of its dots: "fc"
/// matches "fc.weight", and "layer1.*" matches "layer1.0.conv1.weight".
bool matches_name(const std::string& wildcard, const std::string& name);

/// Makes text safe for a terminal: control characters except those in `kept`, byte order marks and
/// bytes that are not UTF-8 become escapes such as "\\x1b".
std::string printable(std::string_view text, std::string_view kept = "");

/// For messages: what a file is, by its first bytes, if it is not what its name promises: a pointer
/// of Git LFS, HTML or XML, a compressed file, text in UTF-16. `unknown` if it is none of these.
std::string foreign_file(std::string_view begin, const std::string& unknown = "");

/// The whole of `text` as a number; std::nullopt if it is not one, is out of range, or has a
/// leading blank or plus sign.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

/// The longest prefix of `text` that has at most `max_bytes` and does not cut a UTF-8 character.
std::string_view utf8_prefix(std::string_view text, size_t max_bytes);

/// The width of UTF-8 text on a terminal in columns, if each character takes one.
int columns_of(std::string_view text);

/// The first `columns` characters of UTF-8 text.
std::string truncated(std::string text, int columns);

/// UTF-8 text of at most `columns` characters, with "…" in place of the rest.
std::string shortened(const std::string& text, int columns);

/// "1.5 s", "320 ms", "2 min 5 s".
std::string format_seconds(double seconds);
inline std::string format_seconds(std::chrono::duration<double> time) {
  return format_seconds(time.count());
}

/// "57.3 kB", "1.2 GB" (powers of 1000).
std::string format_bytes(uint64_t bytes);

}  // namespace syncbn::base

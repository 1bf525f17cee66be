#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::base {

/// The candidate nearest to `word` by edit distance; empty if none is near enough to be meant.
std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates);

/// The end of a message about an unknown name: "; did you mean 'x'?", or "".
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// Splits "a, b" into "a" and "b"; no words for an empty text. A comma at the end yields an empty
/// last word, for the caller to refuse.
std::vector<std::string> words_of(std::string_view text);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

/// join() of the first `max` parts, and how many are left out: "cat, dog, and 998 more".
std::string join_some(std::vector<std::string> parts, std::string_view separator, size_t max);

/// "1 rank", "2 ranks". @param noun in the singular; its plural takes an s.
std::string counted(int64_t count, std::string_view noun);

/// Whether a wildcard, as in a shell, matches a dotted name or what is ahead of one of its dots:
/// "fc" and "layer1.*" match "fc.weight" and "layer1.0.conv1.weight".
bool matches_name(const std::string& wildcard, const std::string& name);

/// Makes text safe for a terminal: control characters except those in `kept`, byte order marks and
/// bytes that are not UTF-8 become escapes such as "\\x1b".
std::string printable(std::string_view text, std::string_view kept = "");

/// The whole of `text` as a number; empty if it is anything else (a leading blank or plus sign
/// included) or out of range.
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

/// The columns that UTF-8 text takes on a terminal; each character counts as one.
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

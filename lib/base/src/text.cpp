#include <syncbn/base/text.h>

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

namespace syncbn::base {
namespace {

// The Levenshtein distance, one row at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

bool begins_character(char byte) {
  constexpr unsigned kContinuation = 0x80, kMask = 0xc0;  // a character's bytes after the first
  return (static_cast<unsigned char>(byte) & kMask) != kContinuation;
}

// The size of the UTF-8 character at the start of the text; 0 if it is not valid UTF-8.
size_t character_size(std::string_view text) {
  const auto byte = [text](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  for (size_t at = 1; at < size; ++at) {
    if (begins_character(text[at])) return 0;
  }
  const unsigned char second = byte(1);
  // Overlong forms, surrogates, and code points above U+10FFFF.
  const bool is_invalid = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                          (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return is_invalid ? 0 : size;
}

// Control characters, including U+0080 to U+009F, and the byte order mark.
bool is_invisible(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  const auto second = static_cast<unsigned char>(character[1]);
  return (first == 0xc2 && second < 0xa0) || character == "\xef\xbb\xbf";
}

}  // namespace

std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates) {
  const std::string* best = nullptr;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = &candidate;
      best_distance = distance;
    }
  }
  if (best != nullptr) return *best;
  // "nproc" and "nprocs" mean "nproc_per_node".
  constexpr size_t kMinBeginning = 3;
  std::optional<std::string> shortest;
  for (const std::string& candidate : candidates) {
    const auto same = std::ranges::mismatch(word, candidate).in1 - word.begin();
    const auto beginning = static_cast<size_t>(same);
    if (beginning < kMinBeginning || beginning + 1 < word.size()) continue;
    if (!shortest || candidate.size() < shortest->size()) shortest = candidate;
  }
  return shortest;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const auto name = nearest(word, candidates);
  return name ? fmt::format("; did you mean '{}'?", *name) : std::string();
}

bool matches_name(const std::string& wildcard, const std::string& name) {
  return ::fnmatch(wildcard.c_str(), name.c_str(), 0) == 0 ||
         ::fnmatch((wildcard + ".*").c_str(), name.c_str(), 0) == 0;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (bool more = !text.empty(); more;) {
    const size_t comma = std::min(text.find(','), text.size());
    more = comma < text.size();
    std::string& word = words.emplace_back(text.substr(0, comma));
    word.erase(0, word.find_first_not_of(' '));
    word.erase(word.find_last_not_of(' ') + 1);
    text.remove_prefix(more ? comma + 1 : comma);
  }
  return words;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

std::string join_some(std::vector<std::string> parts, std::string_view separator, size_t max) {
  if (parts.size() > max) {
    const size_t more = parts.size() - max;
    parts.resize(max);
    parts.push_back(fmt::format("and {} more", more));
  }
  return join(parts, separator);
}

std::string counted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : noun.ends_with('s') ? "es" : "s");
}

std::string printable(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const size_t size = character_size(text);
    const std::string_view character = text.substr(0, std::max<size_t>(size, 1));
    const bool is_shown = size > 0 && !is_invisible(character);
    if (is_shown || kept.find(character) != kept.npos) {
      result += character;
    } else {
      for (const char byte : character) {
        result += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
      }
    }
    text.remove_prefix(character.size());
  }
  return result;
}

std::string_view utf8_prefix(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  while (max_bytes > 0 && !begins_character(text[max_bytes])) --max_bytes;
  return text.substr(0, max_bytes);
}

int columns_of(std::string_view text) {
  return static_cast<int>(std::ranges::count_if(text, begins_character));
}

std::string truncated(std::string text, int columns) {
  int seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (begins_character(text[i]) && seen++ == columns) {
      text.resize(i);
      break;
    }
  }
  return text;
}

std::string shortened(const std::string& text, int columns) {
  return columns_of(text) <= columns ? text : truncated(text, columns - 1) + "…";
}

std::string foreign_file(std::string_view begin, const std::string& unknown) {
  constexpr std::pair<std::string_view, const char*> kKinds[] = {
      {"version https://git-lfs",
       "it is a pointer of Git LFS, not the file: fetch it with `git lfs pull`"},
      {"\x1f\x8b", "it is a compressed file: unpack it with `gzip -dc FILE > NEW_FILE`"},
      {"PK\x03\x04", "it is a compressed file: unpack it with `unzip`"},
      {"BZh", "it is a compressed file: unpack it with `bzip2 -dc FILE > NEW_FILE`"},
      {"\xfd\x37zXZ", "it is a compressed file: unpack it with `xz -dc FILE > NEW_FILE`"},
      {"\x28\xb5\x2f\xfd", "it is a compressed file: unpack it with `zstd -dc FILE > NEW_FILE`"},
      {"7z\xbc\xaf", "it is a compressed file: unpack it with `7z x`"},
      {"\xff\xfe", "it is text in UTF-16: save it in UTF-8"},
      {"\xfe\xff", "it is text in UTF-16: save it in UTF-8"},
  };
  for (const auto& [magic, what] : kKinds) {
    if (begin.starts_with(magic)) return what;
  }
  constexpr size_t kLooked = 512;
  const std::string_view text = begin.substr(0, kLooked);
  const size_t first = text.find_first_not_of(" \t\r\n\xef\xbb\xbf");
  const bool is_text = text.find('\0') == text.npos;
  if (is_text && first != text.npos && text[first] == '<') {
    return "it is HTML, SVG or other XML; if a server sent it in place of the file, download the "
           "file again";
  }
  return unknown;
}

std::string format_seconds(double seconds) {
  // The limits are those of the rounded values: 59.97 s is "1 min 0 s".
  if (seconds < 0.9995e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 0.9995) return fmt::format("{:.0f} ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

std::string format_bytes(uint64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  constexpr std::array kUnits{"kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace syncbn::base

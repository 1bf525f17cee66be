#include "common/words.h"

#include <fmt/format.h>

#include <cctype>

namespace syncbn::launch {

std::optional<std::vector<std::string>> shell_words(std::string_view text) {
  std::vector<std::string> words;
  std::optional<std::string> word;  // set if a word has begun, which may be empty ('')
  char quote = '\0';
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool is_space = std::isspace(static_cast<unsigned char>(c)) != 0;
    if (quote == '\0' && is_space) {
      if (word) words.push_back(*word);
      word.reset();
      continue;
    }
    if (!word) word.emplace();
    if (c == quote) {
      quote = '\0';
    } else if (quote == '\0' && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == '\\' && quote != '\'' && i + 1 < text.size()) {
      *word += text[++i];
    } else {
      *word += c;
    }
  }
  if (quote != '\0') return std::nullopt;
  if (word) words.push_back(*word);
  return words;
}

std::vector<std::string> runs_in(const std::set<int>& numbers, std::string_view dash) {
  std::vector<std::string> runs;
  for (auto next = numbers.begin(); next != numbers.end();) {
    const int first = *next;
    int last = first;
    while (++next != numbers.end() && *next == last + 1) ++last;
    runs.push_back(first == last ? std::to_string(first)
                                 : fmt::format("{}{}{}", first, dash, last));
  }
  return runs;
}

}  // namespace syncbn::launch

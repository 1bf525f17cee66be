#include "common/words.h"

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

}  // namespace syncbn::launch

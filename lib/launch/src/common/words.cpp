#include "common/words.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>

namespace syncbn::launch {
namespace {

bool needs_no_quotes(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-+=./:,@%").find(c) != std::string_view::npos;
}

}  // namespace

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

std::string in_single_quotes(std::string_view word) {
  std::string result = "'";
  for (const char c : word) {
    result += c == '\'' ? R"('\'')" : std::string(1, c);
  }
  return result + "'";
}

std::string shell_quoted(const std::vector<std::string>& words) {
  std::vector<std::string> quoted;
  quoted.reserve(words.size());
  for (const std::string& word : words) {
    const bool bare = !word.empty() && std::all_of(word.begin(), word.end(), needs_no_quotes);
    quoted.push_back(bare ? word : in_single_quotes(word));
  }
  return base::join(quoted, " ");
}

}  // namespace syncbn::launch

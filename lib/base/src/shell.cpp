#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>

namespace syncbn::base {
namespace {

bool needs_no_quotes(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-+=./:,@%").find(c) != std::string_view::npos;
}

}  // namespace

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
    const bool bare = !word.empty() && std::ranges::all_of(word, needs_no_quotes);
    quoted.push_back(bare ? word : in_single_quotes(word));
  }
  return join(quoted, " ");
}

}  // namespace syncbn::base

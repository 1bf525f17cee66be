#include <syncbn/config/wrapped.h>

#include <sstream>

namespace syncbn::config {

std::string wrapped(const std::string& text, size_t indent, size_t columns) {
  std::string out;
  size_t column = indent;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!out.empty() && column + 1 + word.size() > columns) {
      out.append(1, '\n').append(indent, ' ');
      column = indent;
    } else if (!out.empty()) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

}  // namespace syncbn::config

#include "options/exports.h"

#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>

namespace syncbn::launch {

bool is_export_pattern(std::string_view word) {
  if (word.starts_with('!')) word.remove_prefix(1);
  const std::string_view marks = word.find('[') == word.npos ? "_*?" : "_*?[]-";
  const auto fits = [marks](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || marks.find(c) != marks.npos;
  };
  return !word.empty() && std::isdigit(static_cast<unsigned char>(word[0])) == 0 &&
         std::all_of(word.begin(), word.end(), fits);
}

bool is_exported(const std::string& name, const std::vector<std::string>& patterns) {
  bool exported = false;
  for (const std::string& pattern : patterns) {
    const bool leaves_out = pattern.starts_with('!');
    const char* const fits = pattern.c_str() + (leaves_out ? 1 : 0);
    if (::fnmatch(fits, name.c_str(), 0) == 0) exported = !leaves_out;
  }
  return exported;
}

Variables exported_variables(const std::vector<std::string>& more) {
  std::vector<std::string> patterns(kDefaultExports.begin(), kDefaultExports.end());
  patterns.insert(patterns.end(), more.begin(), more.end());
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string name(text.substr(0, equals));
    if (is_exported(name, patterns)) variables[name] = text.substr(equals + 1);
  }
  return variables;
}

}  // namespace syncbn::launch

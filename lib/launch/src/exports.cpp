#include "exports.h"

#include <fnmatch.h>
#include <unistd.h>

#include <string_view>

namespace syncbn::launch {

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

#include "output/line_prefix.h"

#include <syncbn/base/env.h>

#include <map>

namespace syncbn::launch {

std::string line_prefix(const LaunchOptions& options, int rank, int local_rank) {
  const std::string host = base::hostname();
  const std::map<std::string, std::string> values{
      {"${host}", host.substr(0, host.find('.'))},
      {"${rank}", std::to_string(rank)},
      {"${local_rank}", std::to_string(local_rank)},
      {"${role_name}", options.role},
  };
  std::string prefix = options.prefix;
  for (const auto& [name, value] : values) {
    for (size_t at = 0; (at = prefix.find(name, at)) != std::string::npos; at += value.size()) {
      prefix.replace(at, name.size(), value);
    }
  }
  return prefix;
}

}  // namespace syncbn::launch

#pragma once

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::train {

/// base::join() of the first `max` parts, and how many are left out: "cat, dog and 998 more".
inline std::string join_some(std::vector<std::string> parts, std::string_view separator,
                             size_t max) {
  if (parts.size() <= max) return base::join(parts, separator);
  const size_t more = parts.size() - max;
  parts.resize(max);
  return fmt::format("{} and {} more", base::join(parts, separator), more);
}

}  // namespace syncbn::train

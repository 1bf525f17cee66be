#include "sets/shard_names.h"

#include <fmt/format.h>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {
namespace {

constexpr int64_t kMostShards = 10'000'000;

/// What stands between two braces, spelled out.
std::vector<std::string> alternatives(const std::string& inside, const std::string& pattern) {
  std::vector<std::string> all;
  const size_t dots = inside.find("..");
  if (dots == std::string::npos) {
    for (size_t begin = 0; begin <= inside.size();) {
      const size_t end = std::min(inside.find(',', begin), inside.size());
      all.push_back(inside.substr(begin, end - begin));
      begin = end + 1;
    }
    return all;
  }
  const auto first = base::parse_number<int64_t>(inside.substr(0, dots));
  const auto last = base::parse_number<int64_t>(inside.substr(dots + 2));
  if (!first || !last || *first < 0 || *last < *first || *last - *first >= kMostShards) {
    throw base::UserError(
        fmt::format("'{}': {{{}}} is no range; one is like {{000..146}}", pattern, inside));
  }
  for (int64_t i = *first; i <= *last; ++i) all.push_back(fmt::format("{:0{}}", i, dots));
  return all;
}

}  // namespace

std::vector<std::string> expand_braces(const std::string& pattern) {
  const size_t open = pattern.find('{');
  if (open == std::string::npos) return {pattern};
  const size_t close = pattern.find('}', open);
  if (close == std::string::npos) {
    throw base::UserError(fmt::format("'{}': a brace is not closed", pattern));
  }
  const auto tails = expand_braces(pattern.substr(close + 1));
  std::vector<std::string> all;
  for (const auto& middle : alternatives(pattern.substr(open + 1, close - open - 1), pattern)) {
    for (const std::string& tail : tails) {
      all.push_back(fmt::format("{}{}{}", pattern.substr(0, open), middle, tail));
    }
  }
  return all;
}

}  // namespace syncbn::data::detail

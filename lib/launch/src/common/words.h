#pragma once

#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::shell_quoted;
using base::without_secrets;
using base::words_of;

/// Splits into words as a shell does: removes quotes and backslashes, and expands nothing. Empty if
/// a quote is not closed.
std::optional<std::vector<std::string>> shell_words(std::string_view text);

/// The runs of consecutive numbers: "3" and, with `dash` between the ends, "5-7".
std::vector<std::string> runs_in(const std::set<int>& numbers, std::string_view dash);

}  // namespace syncbn::launch

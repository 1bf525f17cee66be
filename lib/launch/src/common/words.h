#pragma once

#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::in_single_quotes;
using base::shell_quoted;
using base::without_secrets;
using base::words_of;

/// Splits into words as a shell does: removes quotes and backslashes, and expands nothing. Empty if
/// a quote is not closed.
std::optional<std::vector<std::string>> shell_words(std::string_view text);

}  // namespace syncbn::launch

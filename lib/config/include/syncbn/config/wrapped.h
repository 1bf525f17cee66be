#pragma once

#include <cstddef>
#include <string>

namespace syncbn::config {

/// Words in lines of at most `columns` columns, of which all but the first begin with `indent`
/// spaces. The text before the first line takes as many.
std::string wrapped(const std::string& text, size_t indent, size_t columns);

}  // namespace syncbn::config

#pragma once

#include <cstddef>
#include <string>

namespace syncbn::config {

/// Wraps text in lines of at most `columns` columns. All lines but the first begin with `indent`
/// spaces; the first continues a line that already has `indent` columns.
std::string wrapped(const std::string& text, size_t indent, size_t columns);

}  // namespace syncbn::config

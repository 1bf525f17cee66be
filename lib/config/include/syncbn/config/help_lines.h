#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <syncbn/config/field_info.h>

namespace syncbn::config {

/// Wraps text in lines of at most `columns` columns. All lines but the first begin with `indent`
/// spaces; the first continues a line that already has `indent` columns.
std::string wrapped(const std::string& text, size_t indent, size_t columns);

constexpr size_t kHelpColumns = 80;

/// "  --name VALUE    text", with the texts of all lines in one column.
std::string help_line(const std::string& name, const std::string& text,
                      size_t columns = kHelpColumns);

/// The line of an option or a key, with its range, unit, default and variable in parentheses.
std::string help_line(const std::string& name, const FieldInfo& field,
                      size_t columns = kHelpColumns);

/// The lines of options, with a blank line and a heading before each group.
std::string option_lines(std::span<const FieldInfo> options, size_t columns = kHelpColumns);

}  // namespace syncbn::config

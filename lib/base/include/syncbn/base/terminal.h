#pragma once

#include <string>

namespace syncbn::base {

/// The width of the terminal on stderr in columns; 80 if it is unknown or stderr is no terminal.
int terminal_columns();

/// The first `columns` characters of UTF-8 text; each counts as one column.
std::string truncated(std::string text, int columns);

}  // namespace syncbn::base

#pragma once

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace syncbn::launch {

/// A line for each row, with columns two blanks apart.
/// @param layout the alignment ("<" or ">") and the least width of each column: "<4 >8 <0".
inline std::string text_table(const std::string& layout,
                              const std::vector<std::vector<std::string>>& rows) {
  std::istringstream columns(layout);
  std::vector<std::string> lines(rows.size());
  char alignment = '<';
  int width = 0;
  for (size_t column = 0; columns >> alignment >> width; ++column) {
    for (const auto& row : rows) width = std::max(width, base::columns_of(row[column]));
    if (alignment == '<' && columns.eof()) width = 0;  // no blanks at the end of a line
    for (size_t i = 0; i < rows.size(); ++i) {
      if (column > 0) lines[i] += "  ";
      lines[i] +=
          fmt::format(fmt::runtime(alignment == '<' ? "{:<{}}" : "{:>{}}"), rows[i][column], width);
    }
  }
  return base::join(lines, "\n") + "\n";
}

}  // namespace syncbn::launch

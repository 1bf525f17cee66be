#include "report/csv.h"

#include <utility>

namespace syncbn::train {

std::vector<std::vector<std::string>> csv_rows(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> row;
  std::string field;
  bool is_quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_quoted) {
      const bool is_doubled = c == '"' && i + 1 < text.size() && text[i + 1] == '"';
      if (c == '"' && !is_doubled) {
        is_quoted = false;
      } else {
        field += c;
        i += is_doubled ? 1 : 0;
      }
    } else if (c == '"') {
      is_quoted = true;
    } else if (c == ',') {
      row.push_back(std::exchange(field, {}));
    } else if (c == '\n') {
      row.push_back(std::exchange(field, {}));
      rows.push_back(std::exchange(row, {}));
    } else {
      field += c;
    }
  }
  return rows;
}

}  // namespace syncbn::train

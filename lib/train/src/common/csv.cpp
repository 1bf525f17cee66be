#include "common/csv.h"

#include <syncbn/base/text.h>

#include <utility>

namespace syncbn::train {

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

std::string csv_line(const std::vector<std::string>& row) {
  std::vector<std::string> fields;
  for (const std::string& field : row) fields.push_back(csv_field(field));
  return base::join(fields, ",") + "\n";
}

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

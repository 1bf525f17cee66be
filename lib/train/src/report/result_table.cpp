#include "report/result_table.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <syncbn/train/task.h>

#include <algorithm>

#include "records/log_record.h"

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

// Minimum width of the state in columns: the state of a failed run is its error.
constexpr int kMinState = 40;

/// "best_test_accuracy"; empty if no metric says which is best, or no evaluation had a number. The
/// value is text if it stands for several runs.
std::string best_column(const Json& result) {
  std::string found;
  for (const auto& [name, value] : result.items()) {
    const bool is_best = name.starts_with("best_") && name != "best_epoch" && name != "best_mode" &&
                         (value.is_number() || value.is_string());
    if (is_best) found = name;
  }
  return found;
}

/// The columns after the `values`: those of all rows, since runs with and without validation data
/// have other metrics.
std::vector<std::string> columns_of(const std::vector<ResultRow>& rows,
                                    const std::vector<std::string>& values) {
  std::vector<std::string> names;
  const auto add = [&names](const std::string& name) {
    if (std::ranges::count(names, name) == 0) names.push_back(name);
  };
  const ResultRow* first = nullptr;
  for (const ResultRow& row : rows) {
    if (row.result.empty()) continue;
    if (first == nullptr) first = &row;
    const std::string best = best_column(row.result);
    if (!best.empty()) {
      add(best);
      add("best_epoch");
      const std::string last = best.substr(best.find('_') + 1);
      if (row.result.contains(last)) add(last);
    }
    for (const auto& [name, value] : row.result.items()) {
      const bool is_loss = name.ends_with("_loss") && name.find("ema_") == name.npos;
      const bool is_known = &row == first || !value.is_null();
      if (is_loss && is_known) add(name);
    }
  }
  if (first == nullptr) return {};
  // Runs that differ in these cannot be compared.
  for (const char* name : {"epochs", "world_size"}) {
    const auto is_other = [&](const ResultRow& other) {
      return !other.result.empty() &&
             other.result.value(name, Json()) != first->result.value(name, Json());
    };
    const bool is_there = std::ranges::count(values, name) > 0;
    if (!is_there && std::ranges::any_of(rows, is_other)) add(name);
  }
  add("seconds");
  return names;
}

/// Truncates the last column at the end of the terminal; empty if less than kMinState would be
/// left.
std::string aligned(const std::vector<Row>& rows, int columns_of_terminal) {
  std::vector<int> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], base::columns_of(row[i]));
  }
  int room = columns_of_terminal - 1;
  for (size_t i = 0; i + 1 < widths.size(); ++i) room -= widths[i] + 2;
  if (room < std::min(widths.back(), kMinState)) return "";
  std::string text;
  for (const Row& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) text += fmt::format("{:>{}}  ", row[i], widths[i]);
    text += base::shortened(row.back(), room) + "\n";
  }
  return text;
}

/// Each row as lines of name and value, below the value of its first column.
std::string listed(const std::vector<Row>& rows) {
  std::string text;
  for (size_t i = 1; i < rows.size(); ++i) {
    text += rows[i].front() + "\n";
    for (size_t k = 1; k < rows[i].size(); ++k) {
      if (!rows[i][k].empty()) text += fmt::format("  {} {}\n", rows.front()[k], rows[i][k]);
    }
  }
  return text;
}

/// A number of a result as text; the column may also be "seconds".
std::string shown_result(const std::string& column, const Json& value) {
  if (column == "seconds" && value.is_number()) return base::format_seconds(value);
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() && is_share(column))
    return fmt::format("{:.2f} %", 100 * value.get<double>());
  if (value.is_number_float()) return shown({}, value.get<double>());
  return value.is_null() ? "nan" : value.dump();
}

}  // namespace

double rank_of(const Json& result) {
  const std::string name = best_column(result);
  if (name.empty() || !result[name].is_number()) return std::numeric_limits<double>::infinity();
  const bool is_lower = result.contains("best_mode") && result["best_mode"] == "min";
  return is_lower ? result[name].get<double>() : -result[name].get<double>();
}

std::string result_table(const std::vector<std::string>& names, std::vector<ResultRow> rows,
                         int columns_of_terminal) {
  std::ranges::stable_sort(rows, {}, &ResultRow::rank);
  const std::vector<std::string> columns = columns_of(rows, names);
  std::vector<Row> texts = {names};
  for (const std::string& column : columns) texts.front().push_back(base::printable(column));
  texts.front().emplace_back("state");
  for (const ResultRow& row : rows) {
    Row text;
    for (const std::string& value : row.values) text.push_back(base::printable(value));
    for (const std::string& column : columns) {
      text.push_back(row.result.contains(column) ? shown_result(column, row.result[column]) : "");
    }
    text.push_back(base::printable(row.state));
    texts.push_back(std::move(text));
  }
  const std::string table = aligned(texts, columns_of_terminal);
  return table.empty() ? listed(texts) : table;
}

}  // namespace syncbn::train

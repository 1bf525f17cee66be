#include "sweep_table.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "csv_field.h"
#include "run_folder.h"

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

/// A line of the table before it is text.
struct Entry {
  SweepResult result;
  Json json;                                                    ///< result.json; empty without one
  std::string best_name;                                        ///< "best_test_accuracy"
  double rank_value = std::numeric_limits<double>::infinity();  ///< the lowest is the best
};

Entry read(const SweepResult& result) {
  Entry entry{.result = result, .json = Json::object(), .best_name = {}};
  if (result.state != kFinished) return entry;  // it may be that of other settings
  entry.json = Json::parse(base::read_file(RunFolder::result(result.folder)), nullptr,
                           /*allow_exceptions=*/false);
  if (!entry.json.is_object()) {
    entry.json = Json::object();
    entry.result.state = "finished, result.json damaged";
  }
  for (const auto& [name, value] : entry.json.items()) {
    const bool is_best = name.starts_with("best_") && name != "best_epoch" && name != "best_mode" &&
                         value.is_number();
    if (!is_best) continue;
    entry.best_name = name;
    const bool is_lower = entry.json.contains("best_mode") && entry.json["best_mode"] == "min";
    entry.rank_value = is_lower ? value.get<double>() : -value.get<double>();
  }
  return entry;
}

std::vector<Entry> read_best_first(const std::vector<SweepResult>& results) {
  std::vector<Entry> entries;
  for (const SweepResult& result : results) entries.push_back(read(result));
  std::ranges::stable_sort(entries, {}, &Entry::rank_value);
  return entries;
}

std::string shown(const std::string& column, const Json& value) {
  if (column == "seconds" && value.is_number()) return base::format_seconds(value);
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.4f}", value.get<double>());
  return value.is_null() ? "nan" : value.dump();
}

/// Columns of the table besides the sweep's keys: the best result, its epoch (if a metric tells the
/// best), and the last losses.
std::vector<std::string> columns_of(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    if (entry.json.empty()) continue;
    std::vector<std::string> names;
    if (!entry.best_name.empty()) names = {entry.best_name, "best_epoch"};
    for (const auto& [name, value] : entry.json.items()) {
      const bool is_loss = name.ends_with("_loss") && name.find("ema_") == name.npos;
      if (is_loss && name != entry.best_name) names.push_back(name);
    }
    // Runs that are not alike in these are not to be compared.
    for (const char* name : {"epochs", "world_size"}) {
      const auto is_other = [&](const Entry& other) {
        return !other.json.empty() &&
               other.json.value(name, Json()) != entry.json.value(name, Json());
      };
      if (std::ranges::any_of(entries, is_other)) names.emplace_back(name);
    }
    names.emplace_back("seconds");
    return names;
  }
  return {};
}

std::string aligned(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:>{}}  ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string csv_line(const Row& row) {
  Row fields;
  for (const std::string& field : row) fields.push_back(csv_field(field));
  return base::join(fields, ",") + "\n";
}

}  // namespace

std::string sweep_table(const SweepPlan& plan, const std::vector<SweepResult>& results) {
  const std::vector<Entry> entries = read_best_first(results);
  const std::vector<std::string> columns = columns_of(entries);
  std::vector<Row> rows = {plan.keys};
  rows.front().insert(rows.front().end(), columns.begin(), columns.end());
  rows.front().emplace_back("state");
  for (const Entry& entry : entries) {
    Row row;
    for (const std::string& value : entry.result.run->values) row.push_back(base::printable(value));
    for (const std::string& column : columns) {
      row.push_back(entry.json.contains(column) ? shown(column, entry.json[column]) : "");
    }
    row.push_back(entry.result.state);
    rows.push_back(std::move(row));
  }
  return aligned(rows);
}

std::string sweep_csv(const SweepPlan& plan, const std::vector<SweepResult>& results) {
  std::vector<Entry> entries;
  std::vector<std::string> columns;
  for (const SweepResult& result : results) {
    entries.push_back(read(result));
    for (const auto& [name, value] : entries.back().json.items()) {
      const bool is_new = std::ranges::count(columns, name) == 0;
      if (is_new && std::ranges::count(plan.keys, name) == 0) columns.push_back(name);
    }
  }
  Row header = plan.keys;
  header.insert(header.end(), columns.begin(), columns.end());
  header.insert(header.end(), {"state", "folder"});
  std::string text = csv_line(header);
  for (const Entry& entry : entries) {
    Row row = entry.result.run->values;
    for (const std::string& column : columns) {
      const bool has = entry.json.contains(column);
      row.push_back(!has                             ? ""
                    : entry.json[column].is_string() ? entry.json[column].get<std::string>()
                                                     : entry.json[column].dump());
    }
    row.push_back(entry.result.state);
    row.push_back(entry.result.folder.string());
    text += csv_line(row);
  }
  return text;
}

}  // namespace syncbn::train

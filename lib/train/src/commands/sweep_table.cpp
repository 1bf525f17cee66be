#include "commands/sweep_table.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/csv.h"
#include "records/log_record.h"
#include "records/run_files.h"
#include "report/result_table.h"

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

ResultRow read(const SweepResult& result) {
  ResultRow row{.values = result.run->values, .result = Json::object(), .state = result.state};
  if (result.state != kFinished) return row;  // result.json may be from other settings
  row.result = json_file(result.folder / run_files::kResult);
  if (row.result.is_null()) {
    row.result = Json::object();
    row.state = "finished, result.json missing or damaged";
  }
  row.rank = rank_of(row.result);
  return row;
}

}  // namespace

std::string sweep_table(const SweepPlan& plan, const std::vector<SweepResult>& results) {
  std::vector<ResultRow> rows;
  for (const SweepResult& result : results) rows.push_back(read(result));
  return result_table(plan.keys, std::move(rows));
}

std::string sweep_csv(const SweepPlan& plan, const std::vector<SweepResult>& results) {
  std::vector<ResultRow> rows;
  std::vector<std::string> columns;
  for (const SweepResult& result : results) {
    rows.push_back(read(result));
    for (const auto& [name, value] : rows.back().result.items()) {
      const bool is_new = std::ranges::count(columns, name) == 0;
      if (is_new && std::ranges::count(plan.keys, name) == 0) columns.push_back(name);
    }
  }
  Row header = plan.keys;
  header.insert(header.end(), columns.begin(), columns.end());
  header.insert(header.end(), {"state", "folder"});
  std::string text = csv_line(header);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Json& result = rows[i].result;
    Row row = rows[i].values;
    for (const std::string& column : columns) {
      const bool has = result.contains(column);
      row.push_back(!has                         ? ""
                    : result[column].is_string() ? result[column].get<std::string>()
                                                 : result[column].dump());
    }
    row.push_back(rows[i].state);
    row.push_back(results[i].folder.string());
    text += csv_line(row);
  }
  return text;
}

}  // namespace syncbn::train

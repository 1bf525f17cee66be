#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace syncbn::train {

/// A line of a table of runs, before it is text.
struct ResultRow {
  std::vector<std::string> values;  ///< of the columns that tell the runs apart
  nlohmann::ordered_json result;    ///< result.json, or an empty object
  std::string state;                ///< "finished"
  double rank = std::numeric_limits<double>::infinity();  ///< rank_of(result)
};

/// A result for sorting: the lowest is the best. Infinite without one.
double rank_of(const nlohmann::ordered_json& result);

inline constexpr int kAnyColumns = std::numeric_limits<int>::max();

/// Rows as a table for a terminal, the best result first: their values, the best result, its epoch
/// and the metric at the end (if a metric tells the best), the last losses, the time, and the
/// state. Where numbers of epochs or ranks differ, they are shown.
/// @param names of the values
/// @param columns_of_terminal where the table is wider, each row is a list
std::string result_table(const std::vector<std::string>& names, std::vector<ResultRow> rows,
                         int columns_of_terminal = kAnyColumns);

/// A number of a result for people, also of a column "seconds".
std::string shown_result(const std::string& column, const nlohmann::ordered_json& value);

}  // namespace syncbn::train

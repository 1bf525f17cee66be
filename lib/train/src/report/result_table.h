#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace syncbn::train {

/// A row of a table of runs, before it is text.
struct ResultRow {
  std::vector<std::string> values;  ///< of the columns that tell the runs apart
  nlohmann::ordered_json result;    ///< result.json, or an empty object
  std::string state;                ///< "finished"
  double rank = std::numeric_limits<double>::infinity();  ///< rank_of(result)
};

/// A sort key: the best result has the lowest. Infinite without a result.
double rank_of(const nlohmann::ordered_json& result);

inline constexpr int kAnyColumns = std::numeric_limits<int>::max();

/// Rows as a table for a terminal, best result first: their values, the best result, its epoch and
/// the metric at the end (if a metric says which is best), the last losses, the time and the state.
/// Numbers of epochs and ranks are shown if they differ.
/// @param names of the values
/// @param columns_of_terminal if the table is wider, each row becomes a list
std::string result_table(const std::vector<std::string>& names, std::vector<ResultRow> rows,
                         int columns_of_terminal = kAnyColumns);

}  // namespace syncbn::train

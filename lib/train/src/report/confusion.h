#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace syncbn::train {

/// The rows of a run's confusion.csv for a page. For up to 30 classes, the matrix, {"classes":
/// [name…], "rows": [[count…]…]}, where a row is a label and a column an answer; for more, the most
/// common mistakes, {"mistakes": [[label, answer, count, samples of the label]…]}. Null if there
/// are no rows or they are damaged.
nlohmann::ordered_json confusion_json(const std::vector<std::vector<std::string>>& rows);

}  // namespace syncbn::train

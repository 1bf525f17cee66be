#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace syncbn::train {

/// A run's confusion.csv for a page: of up to 30 classes the matrix, {"classes": [name…],
/// "rows": [[count…]…]}, where a row is a label and a column an answer; of more the commonest
/// mistakes, {"mistakes": [[label, answer, count, samples of the label]…]}. Null without the file,
/// or if it is damaged.
nlohmann::ordered_json confusion_json(const std::filesystem::path& file);

}  // namespace syncbn::train

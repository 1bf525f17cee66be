#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace syncbn::train {

/// Prefix of the names of the moving average's results.
inline constexpr const char* kAverage = "ema_";

/// The numbers of a line of log.jsonl about a step or an epoch.
struct LogRecord {
  std::string event;  ///< "step" or "epoch"
  double time = 0;    ///< seconds since 1970
  int64_t epoch = 0;  ///< from 1
  int64_t step = 0;
  /// All other keys, in the order written. JSON's null is NaN.
  std::vector<std::pair<std::string, double>> values = {};
};

/// Nothing for a line about anything else.
std::optional<LogRecord> record_of(const nlohmann::ordered_json& line);
/// Nothing for a truncated line either.
std::optional<LogRecord> parse_record(const std::string& line);

/// The value of a key, or `otherwise` if the line has none of this type.
template <class Value>
Value field_of(const nlohmann::ordered_json& line, const char* key, Value otherwise) {
  const auto found = line.is_object() ? line.find(key) : line.end();
  if (found == line.end()) return otherwise;
  const bool is_of_type = std::is_same_v<Value, std::string> ? found->is_string()
                          : std::is_integral_v<Value>        ? found->is_number_integer()
                                                             : found->is_number();
  return is_of_type ? found->template get<Value>() : otherwise;
}

/// The object in a JSON file; null if the file is missing or damaged.
nlohmann::ordered_json json_file(const std::filesystem::path& file);

/// A number is a share in [0, 1], shown in percent, if its name ends with one of these words or has
/// one followed by "_": "val_miou", "test_accuracy_cat".
inline constexpr std::array<std::string_view, 9> kShareWords = {
    "accuracy",         "iou", "ap", "mar", "share", "utilization", "precision", "recall",
    "calibration_error"};

/// Whether a number of this name is a share. The words of the name may have spaces in place of "_".
bool is_share(std::string_view name);

/// Seconds since 1970, as records have them.
double unix_time();

}  // namespace syncbn::train

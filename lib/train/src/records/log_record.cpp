#include "records/log_record.h"

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

namespace syncbn::train {

std::optional<LogRecord> parse_record(const std::string& line) {
  const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const auto number = [&](const auto& key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number() ? found->template get<double>()
                                                     : std::numeric_limits<double>::quiet_NaN();
  };
  const auto count = [&](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number_integer() ? found->template get<int64_t>()
                                                             : int64_t{0};
  };
  const auto event = json.find("event");
  if (event == json.end() || (*event != "step" && *event != "epoch")) return std::nullopt;
  LogRecord record{.event = event->get<std::string>(),
                   .time = number("time"),
                   .epoch = count("epoch"),
                   .step = count("step")};
  for (const auto& [key, value] : json.items()) {
    if (key == "event" || key == "time" || key == "epoch" || key == "step") continue;
    record.values.emplace_back(key, number(key));
  }
  return record;
}

double unix_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace syncbn::train

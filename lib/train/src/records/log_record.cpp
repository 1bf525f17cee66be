#include "records/log_record.h"

#include <syncbn/base/atomic_file.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace syncbn::train {

std::optional<LogRecord> record_of(const nlohmann::ordered_json& line) {
  constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();
  const auto event = field_of<std::string>(line, "event", "");
  if (event != "step" && event != "epoch") return std::nullopt;
  LogRecord record{.event = event,
                   .time = field_of(line, "time", kAbsent),
                   .epoch = field_of<int64_t>(line, "epoch", 0),
                   .step = field_of<int64_t>(line, "step", 0)};
  for (const auto& [key, value] : line.items()) {
    if (key == "event" || key == "time" || key == "epoch" || key == "step") continue;
    record.values.emplace_back(key, value.is_number() ? value.get<double>() : kAbsent);
  }
  return record;
}

std::optional<LogRecord> parse_record(const std::string& line) {
  return record_of(nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false));
}

nlohmann::ordered_json json_file(const std::filesystem::path& file) {
  if (!base::exists(file)) return nullptr;
  const std::string text = base::read_file(file);
  auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : nlohmann::ordered_json(nullptr);
}

bool is_share(std::string_view name) {
  return std::ranges::any_of(kShareWords, [&](std::string_view word) {
    for (size_t at = name.find(word); at != name.npos; at = name.find(word, at + 1)) {
      const size_t end = at + word.size();
      if (end == name.size() || name[end] == '_' || name[end] == ' ') return true;
    }
    return false;
  });
}

double unix_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace syncbn::train

#include <syncbn/config/duration.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <array>
#include <cmath>
#include <optional>
#include <string_view>

namespace syncbn::config {
namespace {

using Unit = Duration::Unit;

struct Suffix {
  std::string_view text;
  Unit unit;
  double factor;
};

constexpr double kMinute = 60;
constexpr double kHour = 60 * kMinute;
constexpr double kDay = 24 * kHour;
constexpr double kMaxCount = 1e15;  // more is a typing error

constexpr std::array kSuffixes = {
    Suffix{"ep", Unit::kEpochs, 1},     Suffix{"step", Unit::kSteps, 1},
    Suffix{"s", Unit::kSeconds, 1},     Suffix{"min", Unit::kSeconds, kMinute},
    Suffix{"h", Unit::kSeconds, kHour}, Suffix{"d", Unit::kSeconds, kDay}};

std::optional<Duration> parse(std::string_view text) {
  const size_t end = text.find_first_not_of("0123456789.");
  if (end == 0 || end == std::string_view::npos) return std::nullopt;
  const auto count = base::parse_number<double>(text.substr(0, end));
  if (!count || *count <= 0) return std::nullopt;
  for (const Suffix& suffix : kSuffixes) {
    if (text.substr(end) != suffix.text) continue;
    const double value = *count * suffix.factor;
    if (value > kMaxCount) return std::nullopt;
    if (suffix.unit == Unit::kSteps && value != std::floor(value)) return std::nullopt;
    return Duration{suffix.unit, value, std::string(text)};
  }
  return std::nullopt;
}

}  // namespace

std::string Duration::str() const {
  if (!text.empty()) return text;
  const char* const suffix = unit == Unit::kEpochs ? "ep" : unit == Unit::kSteps ? "step" : "s";
  return fmt::format("{}{}", count, suffix);
}

bool Codec<Duration>::read(const Value& value, Duration& out, const std::string& path,
                           Faults& faults) {
  const auto parsed = value.kind == Value::Kind::kScalar ? parse(value.scalar) : std::nullopt;
  if (!parsed) {
    detail::wrong_type(value, path,
                       "a duration above 0, such as 2ep, 500step, 30s, 15min, 11h or 1d", faults);
    return false;
  }
  out = *parsed;
  return true;
}

Value Codec<Duration>::write(const Duration& in) {
  return Value::of_scalar(in.str());
}

Value Codec<Duration>::json_schema(Definitions&) {
  Value schema = detail::map_of("type", Value::of_scalar("string", /*quoted=*/true));
  schema.set("pattern", Value::of_scalar("^[0-9]*\\.?[0-9]+(ep|step|s|min|h|d)$", /*quoted=*/true));
  return schema;
}

}  // namespace syncbn::config

#include <syncbn/config/duration.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

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

constexpr std::array kSuffixes = {
    Suffix{"ep", Unit::kEpochs, 1},       Suffix{"step", Unit::kSteps, 1},
    Suffix{"ms", Unit::kSeconds, 1e-3},   Suffix{"s", Unit::kSeconds, 1},
    Suffix{"m", Unit::kSeconds, kMinute}, Suffix{"min", Unit::kSeconds, kMinute},
    Suffix{"h", Unit::kSeconds, kHour},   Suffix{"d", Unit::kSeconds, kDay}};

/// Upper bound on a duration: more is a typing error.
struct Limit {
  double count;
  const char* text;
};

Limit limit_of(Unit unit) {
  if (unit == Unit::kEpochs) return {1e6, "1000000ep"};
  if (unit == Unit::kSteps) return {1e15, "1000000000000000step"};
  return {3650 * kDay, "3650d"};
}

struct Parts {
  double count;
  std::string_view suffix;

  /// Null: unknown.
  const Suffix* find() const {
    const auto* const found = std::ranges::find(kSuffixes, suffix, &Suffix::text);
    return found == kSuffixes.end() ? nullptr : found;
  }
};

std::optional<Parts> split(std::string_view text) {
  const size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const auto count = base::parse_number<double>(text.substr(0, end));
  return count ? std::optional(Parts{*count, text.substr(end)}) : std::nullopt;
}

std::string forms_of(std::string_view count) {
  std::vector<std::string> forms;
  forms.reserve(kSuffixes.size());
  for (const Suffix& suffix : kSuffixes) forms.push_back(fmt::format("{}{}", count, suffix.text));
  const std::string last = forms.back();
  forms.pop_back();
  return base::join(forms, ", ") + " or " + last;
}

/// Sets `out`, or returns what is wrong.
std::optional<std::string> parse(const Value& value, Duration& out) {
  const bool is_text = value.kind == Value::Kind::kScalar;
  const auto parts = is_text ? split(value.scalar) : std::nullopt;
  const Suffix* const suffix = parts ? parts->find() : nullptr;
  if (suffix == nullptr) {
    if (parts && parts->suffix.empty()) {
      return fmt::format("expected a duration, got {} without a unit; write {}", value.str(),
                         forms_of(shortened(value.scalar)));
    }
    return fmt::format("expected a duration, such as 0.5ep, 500step, 30s, 15min, 11h or 1d, got {}",
                       value.str());
  }
  const double count = parts->count * suffix->factor;
  if (count <= 0) return fmt::format("must be above 0, got {}", value.str());
  if (const Limit limit = limit_of(suffix->unit); count > limit.count) {
    return fmt::format("must be at most {}, got {}", limit.text, value.str());
  }
  if (suffix->unit == Unit::kSteps && count != std::floor(count)) {
    return fmt::format("must be a whole number of steps, got {}", value.str());
  }
  out = {suffix->unit, count, value.scalar};
  return std::nullopt;
}

}  // namespace

std::optional<std::chrono::milliseconds> parse_time(std::string_view text) {
  constexpr double kMax = 1e15;
  auto parts = split(text);
  if (!parts) return std::nullopt;
  if (parts->suffix.empty()) parts->suffix = "s";
  const Suffix* const suffix = parts->find();
  if (suffix == nullptr || suffix->unit != Unit::kSeconds) return std::nullopt;
  const double count = parts->count * suffix->factor * 1e3;
  if (count > kMax) return std::nullopt;
  return std::chrono::milliseconds(std::llround(count));
}

std::string Duration::str() const {
  if (!text.empty()) return text;
  const char* const suffix = unit == Unit::kEpochs ? "ep" : unit == Unit::kSteps ? "step" : "s";
  return fmt::format("{}{}", count, suffix);
}

bool Codec<Duration>::read(const Value& value, Duration& out, const std::string& path,
                           Faults& faults) {
  const auto problem = parse(value, out);
  if (problem) faults.add(value.mark, fmt::format("{}: {}", path, *problem));
  return !problem;
}

bool Codec<EpochsOrSteps>::read(const Value& value, EpochsOrSteps& out, const std::string& path,
                                Faults& faults) {
  Faults not_a_number;
  if (Codec<double>::read(value, out.count, path, not_a_number)) {
    out = {.count = out.count, .text = value.scalar};
    return true;
  }
  const auto parts = value.kind == Value::Kind::kScalar ? split(value.scalar) : std::nullopt;
  if (!parts || (parts->suffix != "ep" && parts->suffix != "step")) {
    faults.add(value.mark, fmt::format("{}: expected epochs (5, 0.5ep) or steps (2000step), got {}",
                                       path, value.str()));
    return false;
  }
  Duration duration;
  if (!Codec<Duration>::read(value, duration, path, faults)) return false;
  out = {.count = duration.count, .is_steps = duration.unit == Unit::kSteps, .text = duration.text};
  return true;
}

Value Codec<EpochsOrSteps>::write(const EpochsOrSteps& in) {
  return in.text.empty() ? Codec<double>::write(in.count) : Value::of_scalar(in.text);
}

Value Codec<EpochsOrSteps>::json_schema(Definitions& definitions) {
  Value number = Codec<double>::json_schema(definitions);
  return detail::map_of(
      "anyOf", detail::list_of({std::move(number), Codec<Duration>::json_schema(definitions)}));
}

Value Codec<Duration>::write(const Duration& in) {
  return Value::of_scalar(in.str());
}

Value Codec<Duration>::json_schema(Definitions&) {
  Value schema = detail::map_of("type", Value::of_text("string"));
  // The count is above 0 if one of its digits is not 0.
  const char* const number = "(?=[0-9.]*[1-9])([0-9]+\\.?[0-9]*|\\.[0-9]+)";
  std::vector<std::string> suffixes;
  suffixes.reserve(kSuffixes.size());
  for (const Suffix& suffix : kSuffixes) suffixes.emplace_back(suffix.text);
  const std::string pattern = fmt::format("^{}({})$", number, base::join(suffixes, "|"));
  schema.set("pattern", Value::of_text(pattern));
  return schema;
}

}  // namespace syncbn::config

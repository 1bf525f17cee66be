#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <syncbn/config/codec.h>

namespace syncbn::config {

/// A time: `500ms`, `90s`, `5m` or `5min`, `1.5h`, `1d`, or a number of seconds. Empty for other
/// text and for more than 1e15 ms.
std::optional<std::chrono::milliseconds> parse_time(std::string_view text);

/// How long something lasts or how often it happens: `90ep`, `0.5ep`, `2000step`, or a time with a
/// unit, as parse_time() reads it.
struct Duration {
  enum class Unit { kEpochs, kSteps, kSeconds };

  Unit unit = Unit::kEpochs;
  double count = 0;       ///< above 0; steps are integers
  std::string text = {};  ///< the text in the configuration; empty: not read from one

  static Duration epochs(double count) { return {Unit::kEpochs, count}; }

  std::string str() const;
};

/// The length of a part of a run: a number of epochs, `0.5ep` or `2000step`. May be 0.
struct EpochsOrSteps {
  double count = 0;
  bool is_steps = false;
  std::string text = {};  ///< the text in the configuration

  /// The length in epochs.
  double epochs(int64_t steps_per_epoch) const {
    return is_steps ? count / static_cast<double>(steps_per_epoch) : count;
  }
};

template <>
struct Codec<EpochsOrSteps> {
  static std::string type_name() { return "number, or duration in epochs or steps"; }
  static bool read(const Value& value, EpochsOrSteps& out, const std::string& path, Faults& faults);
  static Value write(const EpochsOrSteps& in);
  static Value json_schema(Definitions& definitions);
};

template <>
struct Codec<Duration> {
  static std::string type_name() { return "duration"; }
  static bool read(const Value& value, Duration& out, const std::string& path, Faults& faults);
  static Value write(const Duration& in);
  static Value json_schema(Definitions& definitions);
};

}  // namespace syncbn::config

#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// The rules of one field, in a chain of calls after Schema::field. In a list, bounds apply to each
/// number; null and `auto` are not checked.
class Rules {
 public:
  Rules& at_least(double bound) { return info_.min = bound, *this; }
  Rules& at_most(double bound) { return info_.max = bound, *this; }
  Rules& between(double least, double most) { return at_least(least).at_most(most); }
  Rules& above(double bound) { return above_ = bound, *this; }
  Rules& below(double bound) { return below_ = bound, *this; }
  /// The number of values in a list.
  Rules& length(size_t count) { return length_ = count, *this; }
  Rules& one_of(std::vector<std::string> all) { return info_.choices = std::move(all), *this; }
  Rules& unit(std::string text) { return info_.unit = std::move(text), *this; }
  Rules& required() { return info_.required = true, *this; }

  // How help and a command line spell the field; FieldInfo explains them.
  Rules& value_name(std::string name) { return info_.value_name = std::move(name), *this; }
  Rules& letter(std::string dashed) { return info_.letter = std::move(dashed), *this; }
  Rules& environment(std::vector<std::string> v) { return info_.environment = std::move(v), *this; }
  /// Shown in place of the default's value.
  Rules& shown_default(std::string text) { return shown_default_ = std::move(text), *this; }

 private:
  friend class SchemaBase;

  std::string bounds() const;
  bool holds(double number) const;
  /// Whether a field's value, as its Codec writes it, keeps the rules.
  bool check(const Value& value, const Mark& mark, const std::string& path, Faults& faults) const;

  FieldInfo info_;  ///< without path, type and range, which follow from the rest
  std::optional<double> above_;
  std::optional<double> below_;
  std::optional<size_t> length_;
  std::optional<std::string> shown_default_;
};

}  // namespace syncbn::config

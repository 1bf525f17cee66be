#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncbn/base/text.h>
#include <syncbn/config/codec.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// The rules of one field; returned by Schema::field to be chained.
template <class M>
class Rules {
 public:
  Rules& at_least(double bound) {
    return number_rule(fmt::format("at least {}", bound), [bound](double x) { return x >= bound; });
  }
  Rules& at_most(double bound) {
    return number_rule(fmt::format("at most {}", bound), [bound](double x) { return x <= bound; });
  }
  Rules& above(double bound) {
    return number_rule(fmt::format("above {}", bound), [bound](double x) { return x > bound; });
  }
  Rules& below(double bound) {
    return number_rule(fmt::format("below {}", bound), [bound](double x) { return x < bound; });
  }
  /// Of a list: how many values it has.
  Rules& length(size_t count) {
    length_ = count;
    return *this;
  }
  Rules& one_of(std::vector<std::string> choices) {
    choices_ = std::move(choices);
    return *this;
  }
  Rules& unit(std::string text) {
    unit_ = std::move(text);
    return *this;
  }
  Rules& required() {
    required_ = true;
    return *this;
  }

 private:
  template <class T>
  friend class Schema;

  struct Rule {
    std::string text;
    std::function<bool(double)> holds;
  };

  Rules& number_rule(std::string text, std::function<bool(double)> holds) {
    numbers_.push_back({std::move(text), std::move(holds)});
    return *this;
  }

  std::string range() const {
    return length_ ? fmt::format("{} values, each {}", *length_, bounds()) : bounds();
  }

  std::string bounds() const {
    if (!choices_.empty()) return "one of " + base::join(choices_, ", ");
    std::vector<std::string> texts;
    for (const Rule& rule : numbers_) texts.push_back(rule.text);
    return base::join(texts, ", ");
  }

  template <class X>
  bool check(const X& value, const Mark& mark, const std::string& path, Faults& faults) const {
    if constexpr (std::is_arithmetic_v<X>) {
      for (const Rule& rule : numbers_) {
        if (rule.holds(static_cast<double>(value))) continue;
        faults.add(mark, fmt::format("{}: must be {}, got {}", path, bounds(), value));
        return false;
      }
    } else if constexpr (std::is_same_v<X, std::string>) {
      if (choices_.empty() || std::find(choices_.begin(), choices_.end(), value) != choices_.end())
        return true;
      faults.add(mark, fmt::format("{}: must be {}, got '{}'{}", path, bounds(), shortened(value),
                                   base::did_you_mean(value, choices_)));
      return false;
    }
    return true;
  }
  template <class X>
  bool check(const std::optional<X>& value, const Mark& mark, const std::string& path,
             Faults& faults) const {
    return !value || check(*value, mark, path, faults);
  }
  template <class X>
  bool check(const OrAuto<X>& value, const Mark& mark, const std::string& path,
             Faults& faults) const {
    return check(value.value, mark, path, faults);
  }
  template <class X>
  bool check(const std::vector<X>& values, const Mark& mark, const std::string& path,
             Faults& faults) const {
    if (length_ && values.size() != *length_) {
      faults.add(mark,
                 fmt::format("{}: must have {} values, got {}", path, *length_, values.size()));
      return false;
    }
    for (const X& value : values) {
      if (!check(value, mark, path, faults)) return false;
    }
    return true;
  }

  std::vector<Rule> numbers_;
  std::optional<size_t> length_;
  std::vector<std::string> choices_;
  std::string unit_;
  bool required_ = false;
};

}  // namespace syncbn::config

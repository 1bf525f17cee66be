#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/value.h>

namespace syncbn::config {

/// The rules of one field; returned by Schema::field to be chained. Bounds hold for each
/// number of a list; null and `auto` have none.
class Rules {
 public:
  Rules& at_least(double bound);
  Rules& at_most(double bound);
  Rules& above(double bound);
  Rules& below(double bound);
  /// Of a list: how many values it has.
  Rules& length(size_t count);
  Rules& one_of(std::vector<std::string> choices);
  Rules& unit(std::string text);
  Rules& required();

 private:
  friend class SchemaBase;

  struct Bound {
    std::string text;  ///< "at least 0"
    double bound;
    bool (*holds)(double number, double bound);
  };

  Rules& add(const char* relation, double bound, bool (*holds)(double, double));
  std::string range() const;
  std::string bounds() const;
  /// Whether a field's value, as its Codec writes it, keeps the rules.
  bool check(const Value& value, const Mark& mark, const std::string& path, Faults& faults) const;

  std::vector<Bound> bounds_;
  std::optional<size_t> length_;
  std::vector<std::string> choices_;
  std::string unit_;
  bool required_ = false;
};

}  // namespace syncbn::config
